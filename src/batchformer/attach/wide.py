"""Models that are handed every image twice (see `after.py`): what of them runs thin."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchformer.attach.after import Thin
from batchformer.attach.padding import takes_padded_images
from batchformer.attach.plan import Plan
from batchformer.attach.plan_checks import check_plain_rows, rows_double
from batchformer.attach.watch import View, parents
from batchformer.errors import UserError


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
        check_plain_rows(model, plan)
