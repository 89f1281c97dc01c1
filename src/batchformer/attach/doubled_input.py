"""Models whose input is doubled, because a parent has noted the batch size before the insertion (XCiT's class token).

`hooks.InputHook` hands every image to the whole model twice; the submodules before the insertion compute the first half
and repeat what they give, so nothing is computed twice.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchformer.attach.dry_run import takes_padded_images
from batchformer.attach.insertion import InstanceForward
from batchformer.attach.plan import InsertionPlan, check_plain_rows, rows_double
from batchformer.attach.probe import ArgumentPath, Probe, given_tensors, parent_paths
from batchformer.errors import UserError
from batchformer.nn.batchformer_v2 import BatchFormerV2
from batchformer.nn.streams import alike, repeat_rows

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class PlainHalfOnly(InstanceForward):
    """A submodule before the insertion of such a model: it computes the plain half only and gives its output twice.

    `in_eval` and `in_training` say which of its arguments have the batch on their first axis in these modes: seen in
    dry runs with different numbers of images, because a shape alone does not tell (four levels are not two images
    doubled). Positions that are the same for all images may be each image's own where training leaves patches out.
    """

    def __init__(
        self,
        layer: nn.Module,
        module: BatchFormerV2,
        in_eval: frozenset[ArgumentPath],
        in_training: frozenset[ArgumentPath],
    ) -> None:
        super().__init__(layer)
        self.module, self.in_eval, self.in_training = module, in_eval, in_training

    @property
    def batch_arguments(self) -> frozenset[ArgumentPath]:
        return self.in_training if self.layer.training else self.in_eval

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.removed or not self.module.active or not self.batch_arguments:
            return self.original(*args, **kwargs)
        args, kwargs = self.halved(args, kwargs)
        rows = next(x.shape[0] for path, x in given_tensors(args, kwargs) if path in self.batch_arguments)
        return repeat_rows(self.original(*args, **kwargs), rows)

    def halved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        """The arguments with the plain half of the tensors at these paths."""
        of_batch = self.batch_arguments
        return (
            tuple(_halved(value, (key,), of_batch) for key, value in enumerate(args)),
            {key: _halved(value, (key,), of_batch) for key, value in kwargs.items()},
        )


def double_input(model: nn.Module, plan: InsertionPlan, opener: str, probes: Sequence[Probe]) -> None:
    """Plan the doubled input of a model whose streams open at the submodule called `opener`, and check it."""
    insertion = plan.insertions[0]
    if norms := [name for name in parent_paths(opener) if isinstance(model.get_submodule(name), _BatchNorm)]:
        raise UserError(  # it would count every image twice
            f"{plan.paths[0]!r} is a part of the BatchNorm {norms[0]!r}: attach after that one."
        )
    plan.input_hook.doubles_input = True
    in_eval, in_training = probes[0], probes[-1]
    for name in dict.fromkeys([opener, *in_eval.called_before(opener), *in_training.called_before(opener)]):
        arguments = in_eval.batch_arguments(name), in_training.batch_arguments(name)
        plain_half = PlainHalfOnly(model.get_submodule(name), insertion.module, *arguments)
        if name == opener:
            insertion.plain_half = plain_half
        elif any(arguments):
            plan.supports.append(plain_half)
    for probe in probes:
        doubled, problem = rows_double(model, plan, probe.training)
        if not doubled:
            why = f" ({type(problem).__name__}: {problem})" if problem is not None else ""
            raise UserError(
                f"{type(model).__name__} does not pass two streams on from {plan.paths[0]!r}{why}: attach after "
                f'another submodule, or use streams="split", which keeps the number of rows.'
            )
    if not takes_padded_images(model):  # their choice of the best boxes turns rounding into other rows
        check_plain_rows(model, plan)


def _halved(value: Any, path: ArgumentPath, paths: frozenset[ArgumentPath]) -> Any:
    if isinstance(value, Tensor):
        return value[: value.shape[0] // 2] if path in paths else value  # a mask that is not needed is None
    if isinstance(value, tuple | list) and any(inner[: len(path)] == path for inner in paths):
        return alike(value, [_halved(item, (*path, number), paths) for number, item in enumerate(value)])
    return value
