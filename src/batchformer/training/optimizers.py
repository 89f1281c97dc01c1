"""Optimizers: options, parameter groups and their learning rates, with a group for the module."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from batchformer.errors import UserError

Rule = tuple[float, float]  # factor of the learning rate, weight decay


@dataclass
class OptimizerOptions:
    """SGD.

    Args:
        lr: peak learning rate.
        momentum: momentum.
        weight_decay: of every parameter, including the module's, as released.
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
class AdamWOptions:
    """AdamW (or SGD), with DeiT's scaling by batch size, and a learning rate and weight decay for the module.

    Biases, norms and what the backbone names (position embedding, class token) have no weight decay.

    Args:
        name: "adamw", "sgd" (with momentum 0.9, Nesterov) or "lars" (with momentum 0.9; biases and norms as in SGD).
        lr: peak learning rate, for a batch of lr_per.
        lr_per: lr is multiplied by the number of images per step, over all devices, and divided by this (DeiT: 512);
            null: lr is not scaled.
        weight_decay: of the network's weights.
        layer_decay: learning rate of each layer relative to the next one; null: the same for all.
        betas: adamw: its two.
        module_lr_factor: the module's learning rate is this times lr.
        module_weight_decay: of the module's weights; null: as the network's (the paper has 0.5 for DeiT-B on ImageNet).
    """

    name: Literal["adamw", "sgd", "lars"] = "adamw"
    lr: float = 5e-4
    lr_per: int | None = 512
    weight_decay: float = 0.05
    layer_decay: float | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    module_lr_factor: float = 1.0
    module_weight_decay: float | None = None

    def check(self) -> None:
        refuse_negative_rates(self)
        refuse_bad_betas(self.betas)
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:  # above 1 the first layers learn the most
            raise UserError(
                f"model.optimizer.layer_decay={self.layer_decay} must be more than 0 and at most 1; null gives all "
                f"layers one learning rate."
            )


def build_sgd(
    options: OptimizerOptions, parameters: Iterable[nn.Parameter], own: Iterable[nn.Parameter], fused: bool
) -> torch.optim.SGD:
    """One group for the network, one for the module (`own`) at `module_lr_factor` times the learning rate.

    Paper, appendix: 0.05 for the network and 0.005 for the module; the weight decay is the same for both, as released.
    """
    own = list(own)
    return torch.optim.SGD(
        rated_groups(options.lr, (without(parameters, own), 1.0), (own, options.module_lr_factor)),
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        nesterov=options.nesterov,
        fused=fused or None,
    )


def rated_groups(lr: float, *groups: tuple[Sequence[nn.Parameter], float]) -> list[dict[str, Any]]:
    """Groups of parameters, each with a factor of the learning rate; those without any are left out."""
    return [{"params": list(some), "lr": lr * factor, "lr_factor": factor} for some, factor in groups if some]


def without(parameters: Iterable[nn.Parameter], others: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    left_out = {id(parameter) for parameter in others}
    return [parameter for parameter in parameters if id(parameter) not in left_out]


def layer_rules(net: nn.Module, options: AdamWOptions) -> dict[str, Rule]:
    """Learning-rate factor and weight decay of every parameter, by name. Call it before the module is attached.

    As in timm: biases, norms and what `no_weight_decay()` of the network names are not decayed, and with layer_decay
    the network's own `group_matcher` says which layer a parameter belongs to (BEiT's rule, as DeiT III uses it).
    """
    from timm.optim import param_groups_layer_decay, param_groups_weight_decay

    kept: Any = net.no_weight_decay() if hasattr(net, "no_weight_decay") else ()  # type: ignore[operator]
    if options.layer_decay is None:
        groups = param_groups_weight_decay(net, options.weight_decay, no_weight_decay_list=kept)
    else:
        groups = param_groups_layer_decay(
            net, options.weight_decay, no_weight_decay_list=kept, layer_decay=options.layer_decay
        )
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    return {
        names[id(parameter)]: (float(group.get("lr_scale", 1.0)), float(group["weight_decay"]))
        for group in groups
        for parameter in group["params"]
    }


def build_optimizer(
    options: AdamWOptions, net: nn.Module, rules: dict[str, Rule], attachment: Any | None, lr: float, fused: bool
) -> torch.optim.Optimizer:
    """Parameters with the same rule form a group; its `lr_factor` multiplies the learning rate of the schedule."""
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for name, parameter in net.named_parameters():
        if name in rules:
            groups.setdefault((*rules[name], False), []).append(parameter)
    decay = options.weight_decay if options.module_weight_decay is None else options.module_weight_decay
    for parameter in [] if attachment is None else attachment.parameters():
        rule = (options.module_lr_factor, decay if parameter.ndim > 1 else 0.0, True)
        groups.setdefault(rule, []).append(parameter)
    made: list[dict[str, Any]] = [
        {"params": parameters, "lr_factor": factor, "lr": lr * factor, "weight_decay": decay, "of_module": own}
        for (factor, decay, own), parameters in groups.items()
    ]
    if options.name == "sgd":
        return torch.optim.SGD(made, lr=lr, momentum=0.9, nesterov=True, fused=fused or None)
    if options.name == "lars":
        from batchformer.training.lars import Lars

        return Lars(made, lr)
    return torch.optim.AdamW(made, lr=lr, betas=tuple(options.betas), fused=fused or None)  # type: ignore[arg-type]


def scaled_lr(options: Any, trainer: Any) -> float:
    """The highest learning rate of options with `lr`; with `lr_per` scaled by the number of images per update."""
    if getattr(options, "lr_per", None) is None:
        return options.lr
    batch = getattr(getattr(trainer, "datamodule", None), "batch_size", None)
    if batch is None:
        raise UserError(
            "optimizer.lr_per scales the learning rate by the batch, which is not known here: give the trainer a "
            "data module with batch_size, or set lr_per null."
        )
    return options.lr * batch * trainer.world_size * trainer.accumulate_grad_batches / options.lr_per


def set_lr(optimizer: torch.optim.Optimizer, lr: float, fused: bool, tensor_on: torch.device | None = None) -> None:
    """Set the learning rate of every group; in place in a tensor where a CUDA graph reads it (`tensor_on`).

    `fused` and `capturable` are set again too: a loaded optimiser state has the values for the device it was
    saved on.
    """
    for group in optimizer.param_groups:
        group["fused"] = fused or None
        if "capturable" in group:
            group["capturable"] = tensor_on is not None and tensor_on.type == "cuda"
        value = lr * group.get("lr_factor", 1.0)
        if tensor_on is None:
            group["lr"] = value
        elif isinstance(group["lr"], Tensor) and group["lr"].device.type == tensor_on.type:
            group["lr"].fill_(value)
        else:
            group["lr"] = torch.tensor(value, dtype=torch.float32, device=tensor_on)


def refuse_negative_rates(options: Any) -> None:
    """Refuse negative learning rates: torch checks the optimiser's default only, not those of the groups."""
    names = ("lr", "backbone_lr", "sampling_lr", "weight_decay", "module_lr_factor", "module_weight_decay",
             "backbone_lr_factor", "gamma")  # fmt: skip
    for name in names:
        value = getattr(options, name, None)
        if value is not None and not value >= 0:
            raise UserError(f"model.optimizer.{name}={value} must not be negative.")


def refuse_bad_betas(betas: tuple[float, float]) -> None:
    """Refuse betas that torch would refuse too, but later and without naming the key."""
    if not all(0 <= beta < 1 for beta in betas):
        raise UserError(f"model.optimizer.betas={list(betas)} must be two numbers of 0 or more and less than 1.")
