"""The device loader on CUDA: the same images as on the CPU, and no wait for the device."""

import pytest
import torch

from batchformer.data import DeviceLoader
from batchformer.data.augment import batched_augmentation

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
STATISTICS = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}


def loader(device, n=2000):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (n, 3, 32, 32), generator=generator, dtype=torch.uint8)
    augmentation = batched_augmentation("autoaugment-cutout")
    labels = torch.arange(n) % 100
    return DeviceLoader(images, labels, batch_size=256, device=device, augmentation=augmentation, **STATISTICS)


def test_cuda_augments_as_the_cpu_does():
    """One grey level (0.016 after normalisation) where float32 rounds differently before the cut to whole numbers."""
    different = total = 0
    for (images, labels), (expected, expected_labels) in zip(loader("cuda"), loader("cpu"), strict=True):
        assert torch.equal(labels.cpu(), expected_labels)
        different += ((images.cpu() - expected).abs() > 1e-4).sum().item()
        total += expected.numel()
    assert different / total < 0.005


def test_an_epoch_never_waits_for_the_device():
    on_device = loader("cuda")
    list(on_device)  # allocations of the first epoch may synchronise
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in on_device:
            pass
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_tf32_does_not_move_pixels():
    before = torch.get_float32_matmul_precision()
    exact = torch.cat([images for images, _ in loader("cuda")])
    torch.set_float32_matmul_precision("high")
    try:
        fast = torch.cat([images for images, _ in loader("cuda")])
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(exact, fast)
