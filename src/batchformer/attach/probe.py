"""What forward hooks see of a model's submodules in dry runs: their arguments, the order of their calls, their rows.

A tensor among the arguments of a submodule is named by its path: args[0] is (0,), kwargs["mask"] is ("mask",), and what
a list holds goes on from there: args[0][2] is (0, 2) (a dense block hands on the outputs of all its layers so far).
"""

from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchformer.attach.dry_run import Example, call_blank, takes_text
from batchformer.errors import UserError

ArgumentPath = tuple[int | str, ...]


def given_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[ArgumentPath, Tensor]]:
    """The tensors among the arguments that have a first axis."""
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return [found for key, value in given for found in _tensors_in(value, (key,))]


def _tensors_in(value: Any, path: ArgumentPath) -> list[tuple[ArgumentPath, Tensor]]:
    if isinstance(value, Tensor):
        return [(path, value)] if value.ndim else []
    items = value if isinstance(value, tuple | list) else ()
    return [found for number, item in enumerate(items) for found in _tensors_in(item, (*path, number))]


def tensors_entering(model: nn.Module, paths: list[str], example: Example | None = None) -> dict[str, Tensor]:
    """The tensor that enters each of `paths` in a dry run, in the order of the calls."""
    seen: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for path in paths:

            def note(_: nn.Module, args: tuple[Any, ...], path: str = path) -> None:
                if args and isinstance(args[0], Tensor):
                    seen.setdefault(path, args[0])

            hooks.enter_context(model.get_submodule(path).register_forward_pre_hook(note))
        problem = call_blank(model, example=example)[1]
    missing = [path for path in paths if path not in seen]
    if missing:
        why = f" ({problem})" if problem else ""
        raise UserError(
            f"{missing[0]!r} was not called with a tensor in a dry run of {type(model).__name__}{why}: pass dim= (and "
            f"name a layer that the model calls; a ModuleList, for example, is never called)."
        )
    return seen


@dataclass
class Calls:
    """The calls of one submodule: when they began and ended, with how many rows its arguments came, what it gave."""

    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    rows: dict[ArgumentPath, int] = field(default_factory=dict)
    output: Tensor | None = None  # the first tensor of what it gives, which is the one that is related
    gives_several: bool = False


def record_calls(
    model: nn.Module, images: int, example: Example | None = None, training: bool = False
) -> dict[str, Calls]:
    """The calls of every submodule, by its name, in one dry run with so many images."""
    seen: dict[str, Calls] = {}
    clock = iter(range(10**9))
    with ExitStack() as hooks:
        for name, module in model.named_modules():

            def begin(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                calls = seen.setdefault(name, Calls())
                calls.begins.append(next(clock))
                calls.rows.update({argument: x.shape[0] for argument, x in given_tensors(args, kwargs)})

            def end(_: nn.Module, args: Any, out: Any, name: str = name) -> None:
                seen[name].ends.append(next(clock))
                seen[name].output = first_tensor(out)
                seen[name].gives_several = not isinstance(out, Tensor)

            hooks.enter_context(module.register_forward_pre_hook(begin, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(end))
        problem = call_blank(model, images, before_each=seen.clear, example=example, training=training)[1]
    if problem is not None and example is not None:
        raise UserError(
            f"{type(model).__name__} did not take example_inputs= with {images} rows ({type(problem).__name__}: "
            f"{problem}): give a batch as the model is called with, a tensor, a tuple or a dict of names."
        )
    if problem is not None and takes_text(model):
        raise UserError(
            f"{type(model).__name__} did not take its own dummy_inputs ({problem}): give a batch as example_inputs=."
        )
    if problem is not None:
        raise UserError(
            f"{type(model).__name__} did not take a blank image of any usual size ({problem}): say what it takes with "
            f'model.default_cfg = {{"input_size": (channels, height, width)}}, or give a batch as example_inputs=.'
        )
    return seen


def first_tensor(out: Any) -> Tensor | None:
    """The one that is related: depth first (transformers' PVT gives a tuple in a tuple)."""
    if isinstance(out, tuple | list):
        return next((found for found in map(first_tensor, out) if found is not None), None)
    return out if isinstance(out, Tensor) and out.ndim else None


@dataclass(frozen=True)
class Probe:
    """The calls in dry runs with two and with three images: in eval mode, or as in training."""

    two: dict[str, Calls]
    three: dict[str, Calls]
    training: bool = False

    def batch_arguments(self, name: str) -> frozenset[ArgumentPath]:
        """The arguments of a submodule whose rows grow with the images."""
        if name not in self.two or name not in self.three:
            return frozenset()
        three = self.three[name].rows
        two = self.two[name].rows
        return frozenset(argument for argument, rows in two.items() if rows == 2 and three.get(argument) == 3)

    def gives_rows(self) -> bool:
        """Whether what leaves the model has a row for each image (a loss that is computed inside has none)."""
        left = [seen[""].output for seen in (self.two, self.three)]
        return [0 if one is None else one.shape[0] for one in left] == [2, 3]

    def called_after(self, submodule: str) -> list[str]:
        """The submodules whose last call begins after the one of `submodule` has ended."""
        end = self.two[submodule].ends[-1]
        return [name for name, calls in self.two.items() if max(calls.begins, default=-1) > end]

    def called_before(self, submodule: str) -> list[str]:
        """The largest submodules whose every call ends before that of `submodule` begins.

        Which lies inside which follows from the times of the calls: one submodule may have several parents (CoaT's
        blocks share some). One that is called by itself as well is left out, as it cannot know what it is given.
        """
        start = self.two[submodule].begins[0]
        early = {name: calls for name, calls in self.two.items() if name and calls.ends and max(calls.ends) < start}
        spans = ((*span, name) for name, calls in early.items() for span in zip(calls.begins, calls.ends, strict=True))
        largest, inner, last = set(), set(), -1
        for begin, end, name in sorted(spans):
            if begin < last:
                inner.add(name)
            else:
                largest.add(name)
                last = end
        return sorted(largest - inner)


def probe_model(model: nn.Module, example: Example | None) -> list[Probe]:
    """A probe in eval mode, where nothing is random; and one as in training where that calls or hands on what eval mode
    does not: a BatchNorm was not called (GoogLeNet's auxiliary heads), or patches are left out (`patch_drop_rate`)."""
    found = [Probe(record_calls(model, 2, example), record_calls(model, 3, example))]
    drops = any(type(part).__name__.startswith("PatchDropout") for part in model.modules())
    if drops or any(isinstance(part, _BatchNorm) and name not in found[0].two for name, part in model.named_modules()):
        with suppress(UserError):  # it may want targets then
            two, three = (record_calls(model, images, example, training=True) for images in (2, 3))
            in_training = Probe(two, three, training=True)
            found += [in_training] if in_training.gives_rows() else []
    return found


def check_batch_first(path: str, two: Calls, three: Calls) -> None:
    """The rows of an output must grow with the images, as a shape alone does not tell."""
    shapes = [tuple(calls.output.shape) for calls in (two, three) if calls.output is not None]
    if len(shapes) == 2 and 3 * shapes[0][0] != 2 * shapes[1][0]:
        raise UserError(
            f"the output of {path!r} does not have the images on its first axis (two of them give the shape "
            f"{shapes[0]}, three {shapes[1]}), so its rows are not samples: attach after a submodule that "
            f"gives (batch, ...)."
        )


def names_with_doubled_rows(plain: dict[str, Calls], both: dict[str, Calls]) -> set[str]:
    """The submodules that were given twice the rows in the second of two dry runs."""
    return {
        name
        for name, calls in plain.items()
        if name in both and any(both[name].rows.get(argument) == 2 * rows for argument, rows in calls.rows.items())
    }


def parent_paths(name: str) -> list[str]:
    """The paths of the submodules that a submodule is a part of, outermost first."""
    parts = name.split(".")
    return [".".join(parts[:k]) for k in range(1, len(parts))]
