"""Insertion points and plans, and the checks that a plan must pass in dry runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from batchformer.attach.contexts import pieces_in_place
from batchformer.attach.dry_run import Example, call_blank
from batchformer.attach.hooks import InputHook
from batchformer.attach.insertion import After, InstanceForward, SharedFeature
from batchformer.errors import UserError
from batchformer.nn import BatchFormer
from batchformer.nn.streams import count_rows, plain_rows, tensors_with_rows

IMAGES = 2  # of a dry run


@dataclass(eq=False, repr=False)
class Point:
    """An insertion point: the module, the insertions on the submodules of `paths`, and the `site` where it is applied.

    The site counts the rows that left the module: the insertion itself, or the feature that several of them share.
    """

    paths: tuple[str, ...]
    module: BatchFormer
    insertions: Sequence[InstanceForward]
    site: SharedFeature | After

    @property
    def side(self) -> str:
        return "after" if isinstance(self.site, After) else "before"

    def __repr__(self) -> str:
        return f"Point({self.side}={' and '.join(self.paths)}, dim={self.module.dim})"


@dataclass
class InsertionPlan:
    """Everything that `attach(after=...)` adds to a model.

    The insertions and their paths, in the order the model calls them; the hook on the model's inputs; and `supports`,
    put on other submodules: those before the insertions compute the plain half only, and those behind keep the streams
    apart.
    """

    paths: list[str]
    insertions: list[After]
    input_hook: InputHook
    example: Example | None = None
    supports: list[InstanceForward] = field(default_factory=list)

    def points(self) -> list[Point]:
        return [Point((path,), one.module, [one], one) for path, one in zip(self.paths, self.insertions, strict=True)]


@contextmanager
def plan_in_place(model: nn.Module, plan: InsertionPlan, **settings: Any) -> Iterator[None]:
    """Add the hook, the insertions and the supports of the plan to the model for a dry run."""
    modules = [one.module for one in plan.insertions]
    hook = model.register_forward_pre_hook(plan.input_hook, with_kwargs=True)
    try:
        with hook, pieces_in_place([*plan.supports, *plan.insertions], modules, **settings):
            yield
    finally:
        plan.input_hook.inside = False
        for insertion in plan.insertions:
            insertion.forget()


def rows_double(model: nn.Module, plan: InsertionPlan, training: bool = False) -> tuple[bool, Exception | None]:
    """Whether twice the images leave a dry run with the plan in place; and what went wrong in it, if anything did."""
    with plan_in_place(model, plan):
        outputs, problem = call_blank(model, IMAGES, example=plan.example, training=training)
    return count_rows(outputs) == 2 * IMAGES, problem


def check_plain_rows(model: nn.Module, plan: InsertionPlan) -> None:
    """With images that differ, the plain rows must be what the plain model gives: a model may return the right number
    of rows in the wrong order."""
    images = 2 * IMAGES
    plain = call_blank(model, images, example=plan.example, noise=True)[0]
    with plan_in_place(model, plan):
        both = call_blank(model, images, example=plan.example, noise=True)[0]
    pairs = zip(tensors_with_rows(plain), tensors_with_rows(both), strict=False)
    if not all(_close_to(two[:images], one) for one, two in pairs if two.shape[0] == 2 * images):
        raise UserError(
            f"{type(model).__name__} mixes up the images of a batch when a second stream opens at {plan.paths[0]!r}: "
            f'attach after another submodule, or use streams="split", which keeps the number of rows.'
        )


def _close_to(found: Tensor, wanted: Tensor) -> bool:
    if not wanted.is_floating_point() or wanted.is_meta:
        return True
    rounding = 1e-2 if wanted.dtype in (torch.float32, torch.float64) else 0.1  # twice the rows may use other kernels
    return not (found.double() - wanted.double()).norm() > rounding * wanted.double().norm()


def check_apart(model: nn.Module, plan: InsertionPlan) -> None:
    """Plain rows must stay as they are whatever the related ones become. They do not where a model itself mixes
    the images of a batch (timm's GCViT gives windows the queries of other images)."""
    rows = _plain_outputs(model, plan, torch.clone)
    changed = not _bitwise_equal(rows, _plain_outputs(model, plan, torch.neg))
    if changed and _bitwise_equal(
        rows, _plain_outputs(model, plan, torch.clone)
    ):  # else the model is never twice the same
        raise UserError(
            f"{type(model).__name__} lets the images of a batch influence each other after {plan.paths[0]!r}, so that "
            f'its plain rows would change with the related ones: attach at a later submodule, or use streams="split" '
            f'or "single".'
        )


def _plain_outputs(model: nn.Module, plan: InsertionPlan, change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """With related rows that are changed behind every module."""

    def changed(_: nn.Module, args: Any, out: Tensor) -> Tensor:
        plain, related = out.chunk(2)
        return torch.cat([plain, change(related)])

    with plan_in_place(model, plan), ExitStack() as hooks:
        for module in {one.module for one in plan.insertions}:
            hooks.enter_context(module.register_forward_hook(changed))
        outputs = call_blank(model, IMAGES, example=plan.example, noise=True)[0]
    return tensors_with_rows(plain_rows(outputs))


def _bitwise_equal(one: list[Tensor], two: list[Tensor]) -> bool:
    """To the bit; what is no number in both is the same."""
    pairs = zip(one, two, strict=True)
    return all(a.is_meta or torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def check_read(model: nn.Module, plan: InsertionPlan, paths: Sequence[str]) -> None:
    """Of submodules that give several tensors the first is related; a model that does not read it would train a
    second stream that is the first one again (CoaT's parallel blocks). Gradients tell, whatever the weights are."""
    if not paths:
        return
    with plan_in_place(model, plan):
        outputs, problem = call_blank(model, IMAGES, example=plan.example, with_graph=True)
    left = [output for output in tensors_with_rows(outputs) if output.requires_grad]
    if problem is not None or not left:
        return
    for path in paths:
        insertion = plan.insertions[plan.paths.index(path)]
        # where not even the layer itself is reached, the graph is cut (frozen, or checkpointed) and tells nothing
        if _reaches(left, insertion.layer) and not _reaches(left, insertion.module):
            raise UserError(
                f"{path!r} gives several tensors, and {type(model).__name__} does not read the first one, which would "
                f"be related, on the way to its output: attach after another submodule."
            )


def _reaches(outputs: Sequence[Tensor], module: nn.Module) -> bool:
    """Whether a gradient of the outputs reaches a weight of the module."""
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    total = torch.stack([output.float().sum() for output in outputs]).sum()
    try:
        found = torch.autograd.grad(total, weights, retain_graph=True, allow_unused=True) if weights else ()
    except RuntimeError:  # checkpoints of the older kind allow no such question
        return False
    return any(one is not None for one in found)
