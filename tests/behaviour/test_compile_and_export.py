"""Promise 5 where a compiler looks at the model: torch.compile, torch.export, ONNX.

Dynamo's own `eager` backend is enough here: what can go wrong is which code is traced and guarded, not how it is
compiled.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import batchformer as bf
from batchformer.nn.streams import count_rows

from ..selection import others_slow
from .cases import CASES, TOKEN_CASES, TRANSFORMERS_CASES, Case, tensors, without_randomness

SMALL = [c for c in CASES if c.name in ("timm-vit_tiny_patch16_224", "resnet20-cifar", "sequential")]
ONE_OF_SMALL = others_slow(SMALL, ["sequential"], key=lambda case: case.name)
# Detectors take long to compile, with or without us: tests/attach/test_detr_runs.py has the smallest one.
COMPILED = [*CASES, *TOKEN_CASES, *TRANSFORMERS_CASES]
# One of each thing that attach puts on a model: before a head, before several, after a layer, wide and thin, BatchNorm.
_WAYS = ("sequential", "timm-deit_tiny_distilled_patch16_224", "timm-vit_tiny_patch16_224-blocks-all",
         "timm-xcit_nano_12_p16_224-after-blocks.1+blocks.2", "timm-resnet18-after-layer2+layer3",
         "transformers-ViTForImageClassification")  # fmt: skip
EVERY_WAY = [case for case in COMPILED if case.name in _WAYS]


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def operations(program: torch.export.ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("case", others_slow(COMPILED, _WAYS, key=lambda case: case.name), ids=lambda c: c.name)
def test_compiled_it_is_the_attached_model(case: Case) -> None:
    model, images = without_randomness(case.model()).train(), case.images()
    if case in EVERY_WAY:  # after its plain twin, whose code must not be taken for its own
        assert count_rows(compiled(case.model().train())(images)) == len(images)
    case.attach(model, dropout=0.0)
    expected = model(images)
    assert count_rows(expected) == 2 * len(images)
    torch.testing.assert_close(tensors(compiled(model)(images)), tensors(expected), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("case", others_slow(EVERY_WAY, _WAYS[:3], key=lambda case: case.name), ids=lambda c: c.name)
def test_attach_and_detach_after_a_compiled_call_are_seen(case: Case) -> None:
    model, images = case.model().train(), case.images()
    fast = compiled(model)
    assert count_rows(fast(images)) == len(images)
    case.attach(fast)
    assert count_rows(fast(images)) == 2 * len(images)
    assert bf.detach(fast) is fast
    assert count_rows(fast(images)) == len(images)


@pytest.mark.parametrize("case", ONE_OF_SMALL, ids=lambda c: c.name)
def test_disabled_is_seen_by_compiled_code(case: Case) -> None:
    model, images = case.model().train(), case.images()
    attachment = case.attach(model)
    fast = compiled(model)
    assert count_rows(fast(images)) == 2 * len(images)
    with attachment.disabled():
        assert count_rows(fast(images)) == len(images)
    assert count_rows(fast(images)) == 2 * len(images)


def test_plain_rows_of_compiled_code_are_told_by_the_mode_whatever_the_batch() -> None:
    model, (images, more) = SMALL[-1].model().train(), (SMALL[-1].images(3), SMALL[-1].images(5))
    attachment = SMALL[-1].attach(model)
    model(more[:4])
    fast = torch.compile(model, backend="eager", dynamic=True)
    assert [len(attachment.plain(fast(batch))) for batch in (images, more)] == [3, 5]
    assert len(attachment.plain(fast.eval()(more))) == 5


@pytest.mark.parametrize("case", SMALL[-1:], ids=lambda c: c.name)
def test_the_real_compiler_gives_the_eager_gradients(case: Case) -> None:
    model, images = case.model().train(), case.images()
    attachment = case.attach(model, dropout=0.0)
    gradients = []
    for forward in (model, torch.compile(model, fullgraph=True)):
        model.zero_grad()
        forward(images).square().sum().backward()
        gradients.append([p.grad.clone() for p in (*model.parameters(), *attachment.parameters())])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_export_in_eval_gives_the_plain_model(case: Case) -> None:
    model, images = case.model().eval(), case.images()
    with torch.no_grad():
        expected = model(images)
    plain = torch.export.export(model, (images,), strict=False)
    case.attach(model)
    exported = torch.export.export(model, (images,), strict=False)
    # Parameters that no operation reads are still listed; the operations are those of the plain model.
    assert operations(exported) == operations(plain)
    with torch.no_grad():
        torch.testing.assert_close(tensors(exported.module()(images)), tensors(expected))


@pytest.mark.parametrize("case", ONE_OF_SMALL, ids=lambda c: c.name)
def test_onnx_of_the_attached_model_gives_the_plain_outputs(case: Case, tmp_path: Path) -> None:
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    model, images = case.model().eval(), case.images()
    with torch.no_grad():
        expected = model(images)
    case.attach(model)
    file = tmp_path / "model.onnx"
    torch.onnx.export(model, (images,), file, dynamo=True, verbose=False)
    names = [tensor.name for tensor in onnx.load(file).graph.initializer]
    assert names
    assert not any("batchformer" in name for name in names)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (outputs,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    torch.testing.assert_close(torch.from_numpy(outputs), expected, atol=1e-4, rtol=1e-4)
