"""TransMix on transformers' models, against the attention they give out themselves."""

from __future__ import annotations

import pytest
import torch
import transformers

import batchformer as bf

from .tiny_models import class_row, opinionated

OPTIONS = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 5,
}


@pytest.mark.parametrize(("kind", "prefix"), [("ViT", 1), ("DeiT", 2)])
def test_attention_is_what_the_model_returns_unfused(kind, prefix):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**OPTIONS)
    model = opinionated(getattr(transformers, f"{kind}ForImageClassification")(config)).eval()
    assert model.config._attn_implementation == "sdpa"
    with bf.mix.TransMix(model, 5) as mix:
        mixed = mix(torch.randn(3, 3, 32, 32), torch.arange(3))
        model(pixel_values=mixed.images)
    model.set_attn_implementation("eager")
    whole = model(mixed.images, output_attentions=True).attentions[-1]
    torch.testing.assert_close(mixed.attention().flatten(1), class_row(whole, "class", prefix), atol=1e-5, rtol=1e-4)


def test_rotary_embeddings_turn_what_is_read_too():
    torch.manual_seed(0)
    given = {key: value for key, value in OPTIONS.items() if key not in ("num_labels", "hidden_size")}
    config = transformers.DINOv3ViTConfig(**given, hidden_size=48, num_register_tokens=2)
    model = opinionated(transformers.DINOv3ViTModel(config)).eval()
    model.set_attn_implementation("eager")
    seen: list[torch.Tensor] = []
    for query in ("class", "mean"):
        with bf.mix.TransMix(model, 5, query=query) as mix:
            hook = mix.recorders[0].layer.register_forward_hook(lambda *given: seen.append(given[-1][1]))
            mixed = mix(torch.randn(3, 3, 32, 32), torch.arange(3))
            model(mixed.images)
            hook.remove()
        expected = class_row(seen[-1], query, 3)
        torch.testing.assert_close(mixed.attention().flatten(1), expected, atol=1e-5, rtol=1e-4)


def vision(kind: str):
    options = {key: value for key, value in OPTIONS.items() if key != "num_labels"}
    config = getattr(transformers, f"{kind}Config")(vision_config=options, num_labels=5)
    return opinionated(getattr(transformers, f"{kind}ForImageClassification")(config)).train()


def test_the_class_token_of_clip_is_no_patch():
    mix = bf.mix.TransMix(model := vision("CLIP"), 5)
    mixed = mix(torch.randn(3, 3, 32, 32), torch.arange(3))
    model(mixed.images)
    assert mixed.attention().shape == (3, 4, 4)
    assert mix.recorders[0].reader.prefix == 1
    assert mix.recorders[0].reader.query == "mean"  # its classifier reads the mean of the patches
    plain = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**OPTIONS))
    assert bf.mix.TransMix(plain, 5).recorders[0].reader.query == "class"


def test_the_pooling_head_of_siglip_is_asked_what_its_probe_attends_to():
    torch.manual_seed(0)
    options = {key: value for key, value in OPTIONS.items() if key != "num_labels"}
    model = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**options)).train()
    mix = bf.mix.TransMix(model, 5)
    head = mix.recorders[0].layer
    torch.nn.init.normal_(head.in_proj_weight)
    given: list[tuple] = []
    head.register_forward_pre_hook(lambda _, args: given.append(args))
    mixed = mix(torch.randn(3, 3, 32, 32), torch.arange(3))
    model(mixed.images)
    expected = torch.nn.MultiheadAttention.forward(head, *given[0])[1][:, 0]
    torch.testing.assert_close(mixed.attention().flatten(1), expected, atol=1e-5, rtol=1e-4)


def test_a_pooling_head_that_the_classifier_leaves_out_is_not_asked():
    """It gets no gradient, so what its probe attends to says nothing about the label."""
    mix = bf.mix.TransMix(model := vision("Siglip"), 5)
    mixed = mix(torch.randn(3, 3, 32, 32), torch.arange(3))
    model(mixed.images).logits.sum().backward()
    asked = mix.recorders[0].layer
    assert next(asked.parameters()).grad.abs().max() > 0
    mix.close()
    model.set_attn_implementation("eager")
    whole = model(mixed.images, output_attentions=True).attentions[-1]
    torch.testing.assert_close(mixed.attention().flatten(1), class_row(whole, "mean", 0), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("pooled", "query"), [(True, "mean"), (False, "class")])
def test_beit_says_whether_the_mean_is_classified(pooled, query):
    config = transformers.BeitConfig(**OPTIONS, use_mean_pooling=pooled)
    with bf.mix.TransMix(transformers.BeitForImageClassification(config), 5) as mix:
        assert mix.recorders[0].reader.query == query
