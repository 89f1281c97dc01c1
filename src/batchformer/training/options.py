"""Options that tasks share, as typed dataclasses: the fields a recipe may set."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from batchformer.errors import UserError, check_choice
from batchformer.kernels.backend import Backend, Memory
from batchformer.nn.encoder import Norm
from batchformer.nn.streams import Streams
from batchformer.parallel.members import Scope

Options = TypeVar("Options")


@dataclass
class ModuleOptions:
    """Options of the module that every task has.

    Args:
        heads: attention heads; must divide the width of the features.
        hidden_dim: width of the module's MLP; null means the width of the features, as published.
        layers: encoder layers of one module.
        group_size: attend within groups of this many samples (the papers' per-GPU batches); null: whole batch.
        streams: "duplicate" as published; "split" sends half of the batch through the module, "single" all.
        scope: "local" attends over the batch of each process, as published; "global" over the batch of all processes.
        process_group: with scope global: number of consecutive processes (e.g. the GPUs of a node); null: all.
        backend: implementation of the attention: "triton", "sdpa", "reference", or "auto", the fastest available one.
        memory: "lean" stores less and recomputes it in the backward; or "fast".
    """

    heads: int = 4
    hidden_dim: int | None = None
    layers: int = 1
    group_size: int | None = None
    streams: Streams = "duplicate"
    scope: Scope = "local"
    process_group: int | None = None
    backend: Backend = "auto"
    memory: Memory = "fast"

    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of `attach`: what is null has the default of the variant."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass
class BatchFormerOptions(ModuleOptions):
    """How the module is attached.

    Args:
        dropout: on attention, MLP and residual branches.
        norm: "post" as published, "pre", or "relative".
        before: dotted name of the submodule to insert the module before; null means the classifier.
    """

    dropout: float = 0.5
    norm: Norm = "post"
    before: str | None = None


@dataclass
class InnerModuleOptions(ModuleOptions):
    """Options of BatchFormerV2 inside a network. null: the default of the variant.

    Args:
        share: one module for all insertion points instead of one each (V2, Table 4); they must have the same width.
        variant: "published", or "stable": trains after any number of blocks.
        dropout: on attention, MLP and residual branches.
        norm: "post" as published, "pre", or "relative" (the default of "stable").
    """

    share: bool = False
    variant: Literal["published", "stable"] = "published"
    dropout: float | None = None
    norm: Norm | None = None


def as_options(kind: type[Options], value: Options | Mapping[str, Any], key: str) -> Options:
    """The options themselves, or made from the plain dict that a checkpoint holds; validated by their `check`.

    `key`: where a recipe has them, below `model:`. Fields that are one of some names are checked here: jsonargparse
    does so on the command line, and from Python nothing else does.
    """
    if not isinstance(value, kind):
        known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
        if not isinstance(value, Mapping):
            raise UserError(f"{kind.__name__} expected, or a dict with some of: {', '.join(known)}; got {value!r}.")
        if unknown := [name for name in value if name not in known]:
            raise UserError(f"{kind.__name__} has no {unknown[0]!r}; it has: {', '.join(known)}.")
        value = kind(**value)
    for name, hint in get_type_hints(kind).items():
        given = getattr(value, name)
        if given is not None and NoneType in get_args(hint):
            hint = get_args(hint)[0]
        if get_origin(hint) is Literal:
            check_choice(f"model.{key}.{name}", given, get_args(hint))
    if hasattr(value, "check"):
        value.check()
    return value


def refuse_below(key: str, options: Any, least: float, *names: str) -> None:
    """Refuse fields below `least`; one that is None is not set."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not value >= least:
            raise UserError(f"model.{key}.{name}={value} must be {least:g} or more.")


def plain_values(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A constructor's own arguments (its `locals()`) as plain values: a checkpoint must load with weights_only=True."""
    given = {name: value for name, value in arguments.items() if name not in ("self", "__class__", "options")}
    return {name: asdict(value) if is_dataclass(value) else value for name, value in given.items()}  # type: ignore[arg-type]
