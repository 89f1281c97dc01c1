"""Which learning rate and which weight decay each parameter gets."""

import pytest
import timm
import torch

from batchformer.tasks import AdamWOptions
from batchformer.training.optimizers import layer_rules

from ..tasks.tiny_vit import VIT, built, fit, vit_task


@pytest.fixture
def vit():
    return timm.create_model("deit_tiny_patch16_224", num_classes=4, **VIT)


def test_biases_norms_tokens_and_positions_are_not_decayed(vit):
    rules = layer_rules(vit, AdamWOptions(weight_decay=0.3))
    decayed = {name for name, (_, decay) in rules.items() if decay}
    free = {name for name, p in vit.named_parameters() if p.ndim <= 1} | {"pos_embed", "cls_token"}
    assert decayed == {name for name, _ in vit.named_parameters()} - free
    assert {decay for _, decay in rules.values()} == {0.0, 0.3}
    assert {factor for factor, _ in rules.values()} == {1.0}


def test_with_layer_decay_each_layer_learns_slower_than_the_one_behind_it(vit):
    rules = layer_rules(vit, AdamWOptions(layer_decay=0.5))
    factors = {name: factor for name, (factor, _) in rules.items()}
    # embedding, three blocks, then norm and head
    assert factors["patch_embed.proj.weight"] == factors["pos_embed"] == 0.5**4
    assert [factors[f"blocks.{k}.attn.qkv.weight"] for k in range(3)] == [0.5**3, 0.5**2, 0.5]
    assert factors["norm.weight"] == 0.5
    assert factors["head.weight"] == 1.0


@pytest.mark.parametrize("layer_decay", [None, 0.7])
def test_the_module_changes_nothing_for_the_others(layer_decay):
    options = AdamWOptions(layer_decay=layer_decay)
    assert built(optimizer=options)._rules == built(optimizer=options, method="baseline")._rules


def test_the_module_has_its_own_learning_rate_and_weight_decay():
    options = AdamWOptions(lr=0.01, lr_per=None, weight_decay=0.05, module_lr_factor=0.5, module_weight_decay=0.4)
    task = vit_task(optimizer=options)
    groups = fit(task).optimizers[0].param_groups
    own = {id(p) for p in task.attachment.parameters()}
    of_module = [group for group in groups if group["of_module"]]
    assert {id(p) for group in of_module for p in group["params"]} == own
    for group in of_module:
        assert group["lr_factor"] == 0.5
        for parameter in group["params"]:
            assert group["weight_decay"] == (0.4 if parameter.ndim > 1 else 0.0)
    everything = [id(p) for group in groups for p in group["params"]]
    assert sorted(everything) == sorted(id(p) for p in task.net.parameters())


def test_without_a_number_the_module_is_decayed_as_the_network():
    groups = fit(vit_task(optimizer=AdamWOptions(weight_decay=0.2))).optimizers[0].param_groups
    assert {group["weight_decay"] for group in groups if group["of_module"]} == {0.2, 0.0}


OPTIMISERS = {  # and what they are documented to have
    "adamw": (torch.optim.AdamW, {"betas": (0.8, 0.95)}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_both_optimisers_train(name):
    kind, settings = OPTIMISERS[name]
    task = vit_task(optimizer=AdamWOptions(name=name, lr=1e-3, lr_per=None, betas=(0.8, 0.95)))
    trainer = fit(task)
    assert type(trainer.optimizers[0]) is kind
    assert all(settings.items() <= group.items() for group in trainer.optimizers[0].param_groups)
    assert all(torch.isfinite(p).all() for p in task.net.parameters())
