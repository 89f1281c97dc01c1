"""The options of a task, typed: what a recipe may say, field by field."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from batchformer.errors import UserError
from batchformer.kernels.backend import Backend, Memory
from batchformer.nn.encoder import Norm
from batchformer.nn.streams import Streams
from batchformer.parallel.members import Scope

Options = TypeVar("Options")


@dataclass
class ModuleOptions:
    """What may be said of the module in every task.

    Args:
        hidden_dim: width of the module's MLP; null means the width of the features, as published.
        layers: encoder layers of one module.
        group_size: attend inside groups of so many samples, as the per-GPU batches of the papers; null: whole batch.
        streams: "duplicate" as published; "split" relates half of the batch; "single" relates all and shares nothing.
        scope: "local" attends over the batch of each process, as published; "global" over that of all of them.
        process_group: with scope global: over so many consecutive processes (the GPUs of a node, say); null: all.
        backend: what computes the attention: "triton", "sdpa", "reference", or "auto", the fittest of them.
        memory: "lean" stores less for the backward and computes it again; or "fast".
    """

    hidden_dim: int | None = None
    layers: int = 1
    group_size: int | None = None
    streams: Streams = "duplicate"
    scope: Scope = "local"
    process_group: int | None = None
    backend: Backend = "auto"
    memory: Memory = "fast"


@dataclass
class BatchFormerOptions(ModuleOptions):
    """How the module is attached.

    Args:
        heads: attention heads; must divide the width of the features.
        dropout: on attention, MLP and residual branches.
        norm: "post" as published, "pre", or "relative".
        before: dotted name of the submodule to insert the module before; null means the classifier.
    """

    heads: int = 4
    dropout: float = 0.5
    norm: Norm = "post"
    before: str | None = None


@dataclass
class LossOptions:
    """Which loss, and its numbers.

    Args:
        name: the loss; ldam also turns the classifier into a cosine classifier.
        tau: logit_adjustment: strength of the adjustment.
        max_margin: ldam: margin of the rarest class.
        scale: ldam: what the cosines are multiplied by.
        reweight_epoch: ldam: first epoch with class weights; null means never.
        beta: ldam: of the effective number behind the class weights.
    """

    name: Literal["cross_entropy", "balanced_softmax", "logit_adjustment", "ldam"] = "balanced_softmax"
    tau: float = 1.0
    max_margin: float = 0.5
    scale: float = 30.0
    reweight_epoch: int | None = None
    beta: float = 0.9999


@dataclass
class OptimizerOptions:
    """SGD.

    Args:
        lr: learning rate at its highest.
        momentum: momentum.
        weight_decay: of every parameter, the module's too, as released.
        nesterov: Nesterov momentum.
        module_lr_factor: the module's learning rate is this times lr, at every epoch (0.1 as published).
    """

    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    nesterov: bool = False
    module_lr_factor: float = 0.1

    def check(self) -> None:
        refuse_negative_rates(self)


@dataclass
class ScheduleOptions:
    """Learning rate per epoch.

    Args:
        name: cosine falls to 0 over the epochs after the warm-up; step multiplies by gamma at each milestone.
        warmup_epochs: epochs of linear warm-up.
        warmup_start: learning rate of the first warm-up epoch, as a factor of lr.
        milestones: step: epochs at which the learning rate falls.
        gamma: step: by which factor.
    """

    name: Literal["cosine", "step", "constant"] = "cosine"
    warmup_epochs: int = 0
    warmup_start: float = 0.5
    milestones: list[int] = field(default_factory=list)
    gamma: float = 0.1


def refuse_negative_rates(options: Any) -> None:
    """torch looks at the optimiser's default learning rate alone; each group has its own, and would climb the loss."""
    for name in ("lr", "weight_decay", "module_lr_factor", "module_weight_decay"):
        if (getattr(options, name, None) or 0) < 0:
            raise UserError(f"model.optimizer.{name}={getattr(options, name)} must not be negative.")


def refuse_bad_betas(betas: tuple[float, float]) -> None:
    """At 1 and above a mean over the past grows without end; torch would say so without naming the key, and later."""
    if not all(0 <= beta < 1 for beta in betas):
        raise UserError(f"model.optimizer.betas={list(betas)} must be two numbers of 0 or more and less than 1.")


def as_options(kind: type[Options], value: Options | Mapping[str, Any]) -> Options:
    """The options themselves, or made from the plain dict that a checkpoint holds."""
    if isinstance(value, kind):
        return value
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    if not isinstance(value, Mapping):
        raise UserError(f"{kind.__name__} expected, or a dict with some of: {', '.join(known)}; got {value!r}.")
    if unknown := [name for name in value if name not in known]:
        raise UserError(f"{kind.__name__} has no {unknown[0]!r}; it has: {', '.join(known)}.")
    return kind(**value)
