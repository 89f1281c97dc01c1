"""attach on a model that is on a CUDA device already."""

import pytest
import timm
import torch
from torch import nn

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


@pytest.mark.filterwarnings("error:.*does not train")
def test_a_captured_training_step_is_neither_checked_nor_a_reason_to_warn() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).cuda().train()
    bf.attach(model, heads=2, dropout=0.0)
    optimizer, criterion = torch.optim.SGD(model.parameters(), lr=0.1), bf.TwoStreamLoss(nn.CrossEntropyLoss())
    x, labels = torch.randn(4, 6, device="cuda"), torch.arange(4, device="cuda") % 3

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        criterion(model(x), labels).backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(32):  # so that the captured forward is one whose norms would be compared
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(100):
        graph.replay()
    step()
