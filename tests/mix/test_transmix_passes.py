"""Which forward pass TransMix takes its attention from; and what is left of it in models and their copies."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import batchformer as bf
from batchformer.errors import UserError
from batchformer.mix.class_attention_readers import ClassAttentionRecorder

from .tiny_models import class_row, vit, whole_attention

VIT = vit("vit_tiny_patch16_224")
IDS = torch.arange(3)


@pytest.mark.parametrize("clean_first", [False, True])
@pytest.mark.parametrize("block", [None, "rollout"])
def test_a_second_pass_before_the_targets_is_noticed(clean_first, block):
    model, images = VIT.build().train(), VIT.images()
    mix = bf.mix.TransMix(model, 5, block=block)
    mixed = mix(images, IDS)
    for seen in (images, mixed.images) if clean_first else (mixed.images, images):
        model(seen)
    with pytest.raises(UserError, match=r"ran more than once .* right after model\(mixed.images\)"):
        mixed.targets()
    again = mix(images, IDS)  # and the next batch is fine
    model(again.images)
    assert again.targets().shape == (3, 5)


def test_a_pass_after_the_targets_changes_nothing():
    model, images = VIT.build().train(), VIT.images()
    mixed = bf.mix.TransMix(model, 5)(images, IDS)
    model(mixed.images)
    attention = mixed.attention()
    model(images)
    assert torch.equal(mixed.attention(), attention)
    expected = class_row(whole_attention(VIT.build(), mixed.images)[-1], "class", 1)
    torch.testing.assert_close(attention.flatten(1), expected, atol=1e-5, rtol=1e-4)


def test_a_batch_mixed_right_behind_a_validation_is_read_in_training():
    model, images = VIT.build().eval(), VIT.images()
    mix = bf.mix.TransMix(model, 5)
    model(images)  # the validation, whose mode is still that of the model when the next batch is mixed
    mixed = mix(images, IDS)
    model.train()(mixed.images)
    expected = class_row(whole_attention(VIT.build(), mixed.images)[-1], "class", 1)
    torch.testing.assert_close(mixed.attention().flatten(1), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.traced
def test_passes_of_batches_that_were_mixed_otherwise_are_compiled_once_and_not_read():
    torch._dynamo.reset()
    model, images = VIT.build().train(), VIT.images()
    mix = bf.mix.TransMix(model, 5)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for step in range(3):
        with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
            mixed = mix(images, IDS)
            compiled(mixed.images)
            mixed.targets()
            compiled(images)
            assert mix.recorders[0].rows is None


def recorders(model: nn.Module) -> int:
    return sum(isinstance(module.__dict__.get("forward"), ClassAttentionRecorder) for module in model.modules())


def test_a_mix_that_nobody_holds_leaves_the_model():
    model = VIT.build()
    for _ in range(3):
        mix = bf.mix.TransMix(model, 5)
        mixed = mix(VIT.images(), IDS)
    gc.collect()
    inner = model.blocks[-1].attn.forward
    assert inner is mix.recorders[0]
    assert inner.previous is None
    model(mixed.images)
    assert mixed.targets().shape == (3, 5)
    del mix
    assert recorders(model) == 1  # the batch still needs it
    del mixed
    gc.collect()
    assert recorders(model) == 0


def test_a_copy_is_cleaned_by_itself():
    model = VIT.build()
    bf.attach(model, after=["blocks.1.attn"], heads=3)
    first, second = bf.mix.TransMix(model, 5), bf.mix.TransMix(model, 5, block="rollout")
    average = copy.deepcopy(model)
    first.close()
    second.close()
    assert recorders(average) == 2
    bf.mix.close(average)
    assert recorders(average) == recorders(model) == 0
    assert "forward" in average.blocks[1].attn.__dict__  # the attachment of the copy stays
    mix = bf.mix.TransMix(model, 5)
    bf.mix.close(model)
    with pytest.raises(UserError, match="was closed"):
        mix(VIT.images(), IDS)
    with pytest.raises(UserError, match="takes a model, and got a TransMix"):
        bf.mix.close(mix)
