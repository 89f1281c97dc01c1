"""attach on a model that is on a CUDA device already."""

import pytest
import timm
import torch

import batchformer as bf

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", [{}, {"blocks": [1]}, {"blocks": "all", "variant": "stable"}])
def test_a_model_on_the_gpu_is_attached_to_where_it_is(place: dict, dtype: torch.dtype) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=3).to("cuda", dtype)
    x = torch.randn(4, 3, 32, 32, device="cuda", dtype=dtype)
    expected = model.eval()(x)
    attachment = bf.attach(model, heads=3, **place)
    assert {(p.device.type, p.dtype) for p in attachment.parameters()} == {("cuda", dtype)}
    assert torch.equal(model.eval()(x), expected)
    model.train()(x).float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in attachment.parameters())
    assert torch.equal(bf.detach(model).eval()(x), expected)
