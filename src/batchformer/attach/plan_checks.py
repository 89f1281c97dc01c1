"""What a plan of `attach(after=...)` must hold, tried in dry runs: both streams leave the model, and apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from batchformer.attach.dry_run import call_blank
from batchformer.attach.plan import Plan
from batchformer.attach.trial import on_trial
from batchformer.errors import UserError
from batchformer.nn.streams import count_rows, plain_rows, tensors_with_rows

IMAGES = 2  # of a dry run


@contextmanager
def in_place(model: nn.Module, plan: Plan, **settings: Any) -> Iterator[None]:
    """With the plan in place for a dry run."""
    hook = model.register_forward_pre_hook(plan.entry, with_kwargs=True)
    try:
        with on_trial([*plan.supports, *plan.insertions], [one.module for one in plan.insertions], **settings):
            yield
    finally:
        hook.remove()
        plan.entry.inside = False


def rows_double(model: nn.Module, plan: Plan, training: bool = False) -> tuple[bool, Exception | None]:
    """Whether twice the images leave a dry run with the plan in place; and what went wrong in it, if anything did."""
    with in_place(model, plan):
        outputs, problem = call_blank(model, IMAGES, example=plan.example, training=training)
    return count_rows(outputs) == 2 * IMAGES, problem


def check_plain_rows(model: nn.Module, plan: Plan) -> None:
    """With images that differ, the plain rows must be what the plain model gives: a model may return the right number
    of rows in the wrong order."""
    images = 2 * IMAGES
    plain = call_blank(model, images, example=plan.example, noise=True)[0]
    with in_place(model, plan):
        both = call_blank(model, images, example=plan.example, noise=True)[0]
    pairs = zip(tensors_with_rows(plain), tensors_with_rows(both), strict=False)
    if not all(_close(two[:images], one) for one, two in pairs if two.shape[0] == 2 * images):
        raise UserError(
            f"{type(model).__name__} mixes up the images of a batch when a second stream opens at {plan.paths[0]!r}: "
            f'attach after another submodule, or use streams="split", which keeps the number of rows.'
        )


def _close(found: Tensor, wanted: Tensor) -> bool:
    if not wanted.is_floating_point() or wanted.is_meta:
        return True
    rounding = 1e-2 if wanted.dtype in (torch.float32, torch.float64) else 0.1  # twice the rows may use other kernels
    return not (found.double() - wanted.double()).norm() > rounding * wanted.double().norm()


def check_apart(model: nn.Module, plan: Plan) -> None:
    """Plain rows must stay as they are whatever the related ones become. They do not where a model lets the images of
    a batch see each other by itself (timm's GCViT gives windows the queries of other images)."""
    rows = _plain_outputs(model, plan, torch.clone)
    changed = not _same(rows, _plain_outputs(model, plan, torch.neg))
    if changed and _same(rows, _plain_outputs(model, plan, torch.clone)):  # else the model is never twice the same
        raise UserError(
            f"{type(model).__name__} lets the images of a batch see each other behind {plan.paths[0]!r}, so that its "
            f'plain rows would change with the related ones: attach further behind, or use streams="split" or '
            f'"single".'
        )


def _plain_outputs(model: nn.Module, plan: Plan, change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """With related rows that are changed behind every module."""

    def changed(_: nn.Module, args: Any, out: Tensor) -> Tensor:
        plain, related = out.chunk(2)
        return torch.cat([plain, change(related)])

    hooks = [module.register_forward_hook(changed) for module in {one.module for one in plan.insertions}]
    try:
        with in_place(model, plan):
            outputs = call_blank(model, IMAGES, example=plan.example, noise=True)[0]
    finally:
        for hook in hooks:
            hook.remove()
    return tensors_with_rows(plain_rows(outputs))


def _same(one: list[Tensor], two: list[Tensor]) -> bool:
    """To the bit; what is no number in both is the same."""
    pairs = zip(one, two, strict=True)
    return all(a.is_meta or torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def check_read(model: nn.Module, plan: Plan, paths: Sequence[str]) -> None:
    """Of submodules that give several tensors the first is related; a model that does not read it would train a
    second stream that is the first one again (CoaT's parallel blocks). Gradients tell, whatever the weights are."""
    if not paths:
        return
    with in_place(model, plan):
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
