"""TransMix where a model really runs: compiled, autocast, checkpointed, copied, with batch attention; and closed."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import batchformer as bf
from batchformer.errors import UserError

from .tiny_models import CASES, class_row, unfused, vit, whole_attention

VIT = vit("vit_tiny_patch16_224")
XCIT = next(case for case in CASES if case.name == "xcit")
IDS = torch.arange(3)


class Shapes(TorchDispatchMode):
    """Notes the largest tensor that is made, and which operations make them."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.operations = 0, []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self.operations.append(str(function))
        for item in out if isinstance(out, tuple | list) else [out]:
            if isinstance(item, Tensor):
                self.largest = max(self.largest, item.numel())
        return out


def test_the_fused_attention_stays_and_nothing_of_the_size_of_the_whole_matrix_is_made():
    model = vit("vit_tiny_patch16_224", img_size=128, patch_size=8, depth=3).build().train()
    images, ids, whole = torch.randn(2, 3, 128, 128), torch.arange(2), 2 * 3 * 257 * 257
    with Shapes() as plain:
        model(images)
    mix = bf.mix.TransMix(model, 5)
    mixed = mix(images, ids)
    with Shapes() as recorded:
        model(mixed.images)
        mixed.targets()
    fused = [name for name in plain.operations if "scaled_dot_product" in name]
    assert len(fused) == 3
    assert [name for name in recorded.operations if "scaled_dot_product" in name] == fused
    assert recorded.largest == plain.largest < whole / 2
    with Shapes() as slow:
        unfused(model)(images)
    assert slow.largest == whole  # what the other way makes


def test_outputs_and_gradients_of_the_model_are_those_without():
    results = []
    for mixes in (False, True):
        model = VIT.build().train()
        mix = bf.mix.TransMix(model, 5, generator=torch.Generator().manual_seed(0))
        mixed = mix(VIT.images(), IDS)
        if not mixes:
            mix.close()
        out = model(mixed.images)
        out.square().sum().backward()
        results.append([out, *(p.grad for p in model.parameters())])
    for without, with_it in zip(*results, strict=True):
        assert torch.equal(without, with_it)


def test_no_gradient_flows_through_lambda():
    model = VIT.build().train()
    mix = bf.mix.TransMix(model, 5)
    mixed = mix(VIT.images().requires_grad_(), IDS)
    logits = model(mixed.images)
    targets = mixed.targets()
    assert not targets.requires_grad
    given, constant = (
        torch.autograd.grad(F.cross_entropy(logits, targets), model.blocks[-1].attn.qkv.weight, retain_graph=True),
        torch.autograd.grad(F.cross_entropy(logits, targets.clone()), model.blocks[-1].attn.qkv.weight),
    )
    assert torch.equal(given[0], constant[0])


@pytest.mark.traced
def test_compiled_code_reads_after_a_plain_twin_was_compiled_and_without_compiling_again():
    torch._dynamo.reset()
    twin, model, images = VIT.build().train(), VIT.build().train(), VIT.images()
    compiled_twin = torch.compile(twin, backend="eager", fullgraph=True)
    compiled_twin(images)
    mix = bf.mix.TransMix(model, 5)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for step in range(3):
        mixed = mix(images, IDS)
        if step == 0:
            compiled(mixed.images)
        else:
            with torch.compiler.set_stance("fail_on_recompile"):
                compiled(mixed.images)
        expected = class_row(whole_attention(VIT.build(), mixed.images)[-1], "class", 1)
        torch.testing.assert_close(mixed.attention().flatten(1), expected, atol=1e-5, rtol=1e-4)
    # put into a model that was compiled before
    mixed = bf.mix.TransMix(compiled_twin, 5)(images, IDS)
    compiled_twin(mixed.images)
    assert mixed.targets().shape == (3, 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_row_is_the_models_own_up_to_its_precision(dtype):
    model = VIT.build().train()
    mixed = bf.mix.TransMix(model, 5)(VIT.images(), IDS)
    with torch.autocast("cpu", dtype=dtype):
        model(mixed.images)
    attention = mixed.attention()
    assert attention.dtype == mixed.targets().dtype == torch.float32
    expected = class_row(whole_attention(model, mixed.images)[-1], "class", 1)
    torch.testing.assert_close(attention.flatten(1), expected, atol=0.02, rtol=0.05)


@pytest.mark.parametrize("block", [None, "rollout"])
def test_gradient_checkpointing_gives_the_same_targets_and_gradients(block):
    results = []
    for checkpointed in (False, True):
        model = VIT.build().train()
        model.set_grad_checkpointing(checkpointed)
        mix = bf.mix.TransMix(model, 5, block=block, generator=torch.Generator().manual_seed(0))
        mixed = mix(VIT.images(), IDS)
        logits = model(mixed.images)
        targets = mixed.targets()
        F.cross_entropy(logits, targets).backward()
        assert torch.equal(mixed.targets(), targets)
        results.append([targets, *(p.grad for p in model.parameters())])
    for plain, recomputed in zip(*results, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_a_validation_between_forward_and_targets_changes_nothing():
    model = VIT.build().train()
    mix = bf.mix.TransMix(model, 5)
    mixed = mix(VIT.images(), IDS)
    model(mixed.images)
    model.eval()
    with torch.no_grad():
        model(torch.randn(3, 3, 64, 64))
    model.train()
    expected = class_row(whole_attention(VIT.build(), mixed.images)[-1], "class", 1)
    torch.testing.assert_close(mixed.attention().flatten(1), expected, atol=1e-5, rtol=1e-4)


def test_targets_can_be_read_after_the_next_batch_was_mixed():
    model = VIT.build().train()
    mix = bf.mix.TransMix(model, 5)
    first = mix(VIT.images(), IDS)
    model(first.images)
    second = mix(VIT.images(), IDS)
    model(second.images)
    for mixed in (second, first):
        expected = class_row(whole_attention(VIT.build(), mixed.images)[-1], "class", 1)
        torch.testing.assert_close(mixed.attention().flatten(1), expected, atol=1e-5, rtol=1e-4)


def test_mixup_batches_of_a_switch_keep_ordinary_targets():
    model = VIT.build().train()
    generator = torch.Generator().manual_seed(0)
    methods = [bf.mix.Mixup(5, alpha=0.8), bf.mix.TransMix(model, 5)]
    kinds = set()
    with bf.mix.MixSwitch(methods, generator=generator) as mix:
        for _ in range(8):
            mixed = mix(VIT.images(), IDS)
            kinds.add(type(mixed).__name__)
            model(mixed.images)
            share = mixed.label_share()
            assert (mixed.mask is None) == torch.equal(share, mixed.share)
    assert kinds == {"Mixed", "TransMixed"}
    assert "forward" not in model.blocks[-1].attn.__dict__


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_reads_nothing_and_disturbs_nothing(copied):
    model = VIT.build().train()
    mix = bf.mix.TransMix(model, 5)
    mixed = mix(VIT.images(), IDS)
    average = copied(model)
    model(mixed.images)
    targets = mixed.targets()
    average(torch.randn(3, 3, 64, 64))
    assert average.blocks[-1].attn.forward.rows is None
    assert average.blocks[-1].attn.forward.layer is average.blocks[-1].attn
    assert torch.equal(mixed.targets(), targets)
    assert list(average.state_dict()) == list(VIT.build().state_dict())


def test_model_and_mix_copied_together_work_together():
    model, mix = copy.deepcopy((lambda model: (model, bf.mix.TransMix(model, 5)))(VIT.build().train()))
    buffer = io.BytesIO()
    torch.save((model, mix), buffer)
    buffer.seek(0)
    for its_model, its_mix in ((model, mix), torch.load(buffer, weights_only=False)):
        mixed = its_mix(VIT.images(), IDS)
        its_model(mixed.images)
        assert mixed.targets().shape == (3, 5)


@pytest.mark.parametrize("case", [VIT, XCIT], ids=lambda case: case.name)
@pytest.mark.parametrize("place", [{"after": ["blocks.0"], "heads": 4}, {"heads": 4}], ids=["after", "before"])
def test_with_batch_attention_the_plain_rows_give_the_targets_of_both_streams(case, place):
    model, plain, images = case.build(), case.build(), case.images()
    for module in (*model.modules(), *plain.modules()):
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0
    attachment = bf.attach(model.train(), **place)
    mixed = bf.mix.TransMix(model, 5)(images, IDS)
    logits = model(mixed.images)
    assert len(logits) == 6
    assert mixed.targets().shape == (3, 5)
    expected = class_row(whole_attention(plain.train(), mixed.images)[-1], "class", 1)
    torch.testing.assert_close(mixed.attention().flatten(1), expected, atol=1e-5, rtol=1e-4)
    loss = bf.TwoStreamLoss(nn.CrossEntropyLoss())(logits, mixed.targets())
    twice = [F.cross_entropy(rows, mixed.targets()) for rows in (attachment.plain(logits), attachment.related(logits))]
    torch.testing.assert_close(loss, sum(twice) / 2)
    loss.backward()


def test_with_half_of_the_batch_related_every_row_has_its_own_attention():
    model, images = VIT.build(), VIT.images(4)
    bf.attach(model.train(), after=["blocks.0"], heads=3, streams="split", dropout=0.0)
    mixed = bf.mix.TransMix(model, 5)(images, torch.arange(4))
    assert len(model(mixed.images)) == 4
    torch.testing.assert_close(
        mixed.attention().flatten(1),
        class_row(whole_attention(model, mixed.images)[-1], "class", 1),
        atol=1e-5,
        rtol=1e-4,
    )


def traces(model: nn.Module) -> list[str]:
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name in ("forward", "_forward_hooks", "_forward_pre_hooks")
        if (module.__dict__.get(name) if name != "forward" else name in module.__dict__)
    ]


def test_closing_leaves_no_trace_and_says_so():
    model = VIT.build()
    before = list(model.state_dict())
    with bf.mix.TransMix(model, 5, block="rollout") as mix:
        assert len(traces(model)) == 2
        assert list(model.state_dict()) == before
    assert traces(model) == []
    mix.close()  # twice does no harm
    with pytest.raises(UserError, match="was closed"):
        mix(VIT.images(), IDS)


@pytest.mark.parametrize("first", ["attach", "mix"])
@pytest.mark.parametrize("out_first", ["attach", "mix"])
def test_whoever_came_and_goes_first_nothing_is_left(first, out_first):
    model = VIT.build()
    take_out = {}
    for who in ("attach", "mix") if first == "attach" else ("mix", "attach"):
        if who == "attach":
            take_out[who] = bf.attach(model, after=["blocks.1.attn"], heads=3).detach
        else:
            take_out[who] = bf.mix.TransMix(model, 5).close
    take_out.pop(out_first)()
    next(iter(take_out.values()))()
    assert traces(model) == []
    other, again = bf.mix.TransMix(model, 5), bf.mix.TransMix(model, 5)
    other.close()
    again.close()
    assert traces(model) == []


@pytest.mark.traced
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripting_says_to_close_first_and_then_works():
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]

    model = Reads()
    mix = bf.mix.TransMix(model, 5)
    with pytest.raises(AttributeError, match=r"close the mix first"):
        torch.jit.script(model)
    mix.close()
    assert torch.jit.script(model)(torch.randn(2, 4, 8)).shape == (2, 4, 8)
