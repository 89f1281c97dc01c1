"""`backend=` and `memory=` reach the layers from every entry point, and each of them reports which backend runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import batchformer as bf
from batchformer.errors import UserError
from batchformer.kernels import backend as room
from batchformer.tasks import BatchFormerOptions, InsertionOptions, LongTailed

from ..tasks.conftest import info
from ..tasks.tiny_vit import vit_task


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.scores = nn.Linear(6, 32), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(self.stem(x))


def numbers_stored(module: bf.BatchFormer, x: torch.Tensor) -> int:
    numbers: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (numbers.append(t.numel()), t)[1], lambda t: t):
        module.relate(x)
    return sum(numbers)


@pytest.mark.parametrize("kind", [bf.BatchFormer, bf.BatchFormerV2])
def test_backends_agree_and_the_module_says_which_it_takes(kind: type[bf.BatchFormer]) -> None:
    slow, fast = (kind(32, heads=2, dropout=0.0, layers=2, backend=name) for name in ("reference", "sdpa"))
    fast.load_state_dict(slow.state_dict())
    x = torch.randn(5, 3, 32)
    torch.testing.assert_close(slow(x), fast(x))
    assert [m.backend_used().backend for m in (slow, fast)] == ["reference", "sdpa"]
    assert "'reference' was asked for" in slow.backend_used().why


def test_auto_on_the_cpu_is_torchs_attention_and_says_why() -> None:
    choice = bf.BatchFormer(32).backend_used()
    assert choice.backend == "sdpa"
    assert choice.why


@pytest.mark.traced
def test_the_answer_depends_on_autocast_and_on_the_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_HAS_TRITON", True)
    monkeypatch.setattr(room, "_INTERPRETED", True)
    module = bf.BatchFormer(32, heads=2, backend="triton", scope="global")
    assert module.backend_used().fused
    assert "positions" in module.backend_used().why
    double = bf.BatchFormer(32, heads=2, backend="triton").double()
    with pytest.raises(UserError, match="float64"):
        double.backend_used()
    with torch.autocast("cpu", torch.bfloat16):
        assert double.backend_used().backend == "triton"


def test_lean_stores_less_through_every_layer() -> None:
    x = torch.randn(5, 3, 32, requires_grad=True)
    fast, lean = (bf.BatchFormer(32, layers=2, memory=name) for name in ("fast", "lean"))
    assert numbers_stored(lean, x) < numbers_stored(fast, x) / 4


def test_attach_takes_them_and_answers_for_every_place() -> None:
    attachment = bf.attach(Tower(), "scores", heads=2, backend="reference", memory="lean")
    assert {path: choice.backend for path, choice in attachment.backend_used().items()} == {"scores": "reference"}
    assert attachment.points[0].module.layers[0].memory == "lean"
    with pytest.raises(UserError, match="backend='cuda'"):
        bf.attach(Tower(), "scores", backend="cuda")


def test_recipes_may_set_them_and_the_scope() -> None:
    said = {"backend": "reference", "memory": "lean", "scope": "global", "process_group": 2}
    tasks = (
        LongTailed("resnet20", batchformer=BatchFormerOptions(**said)),
        vit_task(batchformer=InsertionOptions(blocks=[0, 2], **said)),
    )
    for task in tasks:
        task.construct(info([1] * 4))
        for point in task.attachment.points:
            assert (point.module.scope, point.module.members.process_group) == ("global", 2)
            assert point.module.layers[0].memory == "lean"
        assert {choice.backend for choice in task.attachment.backend_used().values()} == {"reference"}
