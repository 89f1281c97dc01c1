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
