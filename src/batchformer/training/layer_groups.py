"""Parameter groups of AdamW: no decay where it does harm, less learning rate towards the input, the module apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from batchformer.tasks.classification.options import AdamWOptions

Rule = tuple[float, float]  # factor of the learning rate, weight decay


def layer_rules(net: nn.Module, options: AdamWOptions) -> dict[str, Rule]:
    """For every parameter of the network, by name. Asked before the module is attached: its layers are none of these.

    timm decides: biases, norms and what `no_weight_decay()` of the network names are not decayed, and with layer_decay
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
    return torch.optim.AdamW(made, lr=lr, betas=tuple(options.betas), fused=fused or None)  # type: ignore[arg-type]
