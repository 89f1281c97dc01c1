"""Mixing on a CUDA device; and, where there is none, that nothing looks at a value there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import batchformer as bf

from .tiny_models import class_row, vit, whole_attention

VIT = vit("vit_tiny_patch16_224")
METHODS = {
    "Mixup": lambda model, **options: bf.mix.Mixup(5, **options),
    "CutMix": lambda model, **options: bf.mix.CutMix(5, **options),
    "TransMix": lambda model, **options: bf.mix.TransMix(model, 5, **options),
    "rollout": lambda model, **options: bf.mix.TransMix(model, 5, block="rollout", **options),
}


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_no_step_depends_on_a_value_of_the_device(method, per_sample):
    # Tensors without values: whoever asks for one, as a host that waits for its device does, is refused.
    model = VIT.build().to("meta").train()
    images, ids = VIT.images().to("meta"), torch.arange(3, device="meta")
    mixed = method(model, per_sample=per_sample, label_smoothing=0.1)(images, ids)
    loss = F.cross_entropy(model(mixed.images), mixed.targets())
    loss.backward()
    assert mixed.targets().device.type == "meta"


@pytest.mark.gpu
class TestOnCuda:
    @pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
    def test_a_step_never_waits_for_the_device(self, method):
        model, images, ids = VIT.build().cuda().train(), VIT.images().cuda(), torch.arange(3).cuda()
        mix = method(model, label_smoothing=0.1)
        for step in range(3):
            torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first step sets the device up
            try:
                mixed = mix(images, ids)
                F.cross_entropy(model(mixed.images), mixed.targets()).backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")

    @pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
    @pytest.mark.parametrize("per_sample", [False, True])
    def test_the_same_seed_gives_the_batch_of_the_cpu(self, method, per_sample):
        made = []
        for device in ("cpu", "cuda"):
            model = VIT.build().to(device).train()
            mix = method(model, per_sample=per_sample, generator=torch.Generator().manual_seed(3))
            mixed = mix(VIT.images().to(device), torch.arange(3).to(device))
            model(mixed.images)
            made.append((mixed.images.cpu(), mixed.targets().cpu()))
        torch.testing.assert_close(*made, atol=1e-4, rtol=1e-3)

    def test_a_generator_on_the_device_draws_there(self):
        made = []
        for _ in range(2):
            mix = bf.mix.CutMix(5, per_sample=True, generator=torch.Generator("cuda").manual_seed(1))
            made.append(mix(VIT.images().cuda(), torch.arange(3).cuda()).images)
        assert torch.equal(*made)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast_row_is_that_of_the_stock_model(self, dtype):
        model = VIT.build().cuda().train()
        mixed = bf.mix.TransMix(model, 5)(VIT.images().cuda(), torch.arange(3).cuda())
        with torch.autocast("cuda", dtype=dtype):
            model(mixed.images)
        attention = mixed.attention()
        expected = class_row(whole_attention(model, mixed.images)[-1], "class", 1)
        torch.testing.assert_close(attention.flatten(1), expected, atol=0.02, rtol=0.05)

    def test_the_real_compiler_reads_the_same_row(self):
        torch._dynamo.reset()
        twin, model, images = VIT.build().cuda().train(), VIT.build().cuda().train(), VIT.images().cuda()
        torch.compile(twin, fullgraph=True)(images)
        mix = bf.mix.TransMix(model, 5)
        compiled = torch.compile(model, fullgraph=True)
        for _ in range(2):
            mixed = mix(images, torch.arange(3).cuda())
            F.cross_entropy(compiled(mixed.images), mixed.targets()).backward()
            expected = class_row(whole_attention(VIT.build().cuda(), mixed.images)[-1], "class", 1)
            torch.testing.assert_close(mixed.attention().flatten(1), expected, atol=2e-3, rtol=2e-2)
