"""Models that are handed every image twice (see `after.py`): what of them runs thin, and whether that is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchformer.attach.after import Thin
from batchformer.attach.dry_run import View, parents
from batchformer.attach.padding import takes_padded_images
from batchformer.attach.plan import Plan
from batchformer.attach.probe import call_blank
from batchformer.attach.trial import on_trial
from batchformer.errors import UserError
from batchformer.nn.streams import count_rows, tensors_with_rows

IMAGES = 2  # of a dry run


def make_wide(model: nn.Module, plan: Plan, place: str, looks: Sequence[View]) -> None:
    opener = plan.insertions[0]
    if norms := [name for name in parents(place) if isinstance(model.get_submodule(name), _BatchNorm)]:
        raise UserError(  # it would count every image twice
            f"{plan.paths[0]!r} is a part of the BatchNorm {norms[0]!r}: attach after that one."
        )
    plan.entry.wide = True
    in_eval, in_training = looks[0], looks[-1]
    for name in dict.fromkeys([place, *in_eval.before(place), *in_training.before(place)]):
        arguments = in_eval.batch_arguments(name), in_training.batch_arguments(name)
        thin = Thin(model.get_submodule(name), opener.module, *arguments)
        if name == place:
            opener.thin = thin
        elif any(arguments):
            plan.supports.append(thin)
    for look in looks:
        doubled, problem = rows_double(model, plan, look.training)
        if not doubled:
            why = f" ({type(problem).__name__}: {problem})" if problem is not None else ""
            raise UserError(
                f"{type(model).__name__} does not pass two streams on from {plan.paths[0]!r}{why}: attach after "
                f'another submodule, or use streams="split", which keeps the number of rows.'
            )
    if not takes_padded_images(model):  # their choice of the best boxes turns rounding into other rows
        _check_plain_rows(model, plan)


def rows_double(model: nn.Module, plan: Plan, training: bool = False) -> tuple[bool, Exception | None]:
    """Whether twice the images leave a dry run with the plan in place; and what went wrong in it, if anything did."""
    with in_place(model, plan):
        outputs, problem = call_blank(model, IMAGES, example=plan.example, training=training)
    return count_rows(outputs) == 2 * IMAGES, problem


def _check_plain_rows(model: nn.Module, plan: Plan) -> None:
    """Of images that differ, the first half must be what the plain model gives: the number of rows tells nothing of
    their order."""
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
