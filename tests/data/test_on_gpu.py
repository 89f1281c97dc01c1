"""The device loader on CUDA: the same images as on the CPU, and no wait for the device."""

import pytest
import torch

from batchformer.data import DeviceLoader
from batchformer.data.augment import batched_augmentation, resample

pytestmark = pytest.mark.gpu
STATISTICS = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}


def loader(device, augment="autoaugment-cutout", size=32, n=2000, erase_prob=0.0, **options):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (n, 3, 32, 32), generator=generator, dtype=torch.uint8)
    augmentation = batched_augmentation(augment, 32, size, erase_prob)
    labels = torch.arange(n) % 100
    return DeviceLoader(
        images, labels, batch_size=256, device=device, augmentation=augmentation, **STATISTICS, **options
    )


CASES = pytest.mark.parametrize(
    "case",
    [
        {},
        {"augment": "randaugment", "erase_prob": 0.25, "repeats": 3},
        {"augment": "randaugment", "size": 80, "erase_prob": 0.25, "n": 520},
        {"augment": "resized-crop", "size": 80, "n": 520},
        {"augment": "resized-crop", "size": 20, "n": 520},
        {"augment": "crop-flip", "size": 48, "n": 520},
        {"augment": "moco-v3-2", "n": 520},
        {"augment": "randaugment", "size": 80, "n": 520, "training": False},
    ],
    ids=str,
)


@CASES
def test_cuda_augments_as_the_cpu_does(case):
    """One grey level (0.016 after normalisation) where float32 rounds differently before the cut to whole numbers."""
    different = total = 0
    for batch, expected in zip(loader("cuda", **case), loader("cpu", **case), strict=True):
        assert torch.equal(batch["labels"].cpu(), expected["labels"])
        different += ((batch["images"].cpu() - expected["images"]).abs() > 1e-4).sum().item()
        total += expected["images"].numel()
    assert different / total < 0.005


@CASES
def test_an_epoch_never_waits_for_the_device(case):
    on_device = loader("cuda", **case)
    list(on_device)  # allocations of the first epoch may synchronise
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in on_device:
            pass
    finally:
        torch.cuda.set_sync_debug_mode("default")


@CASES
def test_an_epoch_read_again_is_the_same_bits(case):
    on_device = loader("cuda", **case)
    first = [batch["images"] for batch in on_device]
    on_device.set_epoch(0)
    assert all(torch.equal(a, b) for a, b in zip(first, (batch["images"] for batch in on_device), strict=True))


@CASES
def test_tf32_does_not_move_pixels(case):
    before = torch.get_float32_matmul_precision()
    exact = torch.cat([batch["images"] for batch in loader("cuda", **case)])
    torch.set_float32_matmul_precision("high")
    try:
        fast = torch.cat([batch["images"] for batch in loader("cuda", **case)])
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(exact, fast)


def test_detectors_samples_kept_on_the_device_make_the_same_batches_there(tmp_path):
    from lightning import Trainer

    from batchformer.data import CocoPanoptic
    from batchformer.data.sets import write_miniature

    root = str(write_miniature("coco-panoptic", tmp_path / "data"))
    options = {"image_size": 32, "batch_size": 4, "limit_train": 8, "workers": 0, "augment": "none"}
    kept, plain = CocoPanoptic(root, **options, cache="device"), CocoPanoptic(root, **options)
    kept.trainer = plain.trainer = Trainer(accelerator="gpu", devices=1, logger=False, enable_checkpointing=False)
    ours, theirs = kept.train_dataloader(), plain.train_dataloader()
    for _ in range(2):
        for batch, expected in zip(ours, theirs, strict=True):
            assert torch.equal(batch["pixel_values"].cpu(), expected["pixel_values"])
            for label, other in zip(batch["labels"], expected["labels"], strict=True):
                assert all(label[name].is_cuda and torch.equal(label[name].cpu(), other[name]) for name in other)


@pytest.mark.parametrize("shape", [(32, 32, 224), (20, 28, 33), (64, 64, 40), (70, 65, 48)], ids=str)
def test_resized_crops_are_those_of_the_cpu_to_the_bit(shape):
    """By the kernel, and where the images are too large for it by products."""
    rows, columns, size = shape
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(256, (50, 3, rows, columns), generator=draw, dtype=torch.uint8)
    height, width = (torch.randint(2, length + 1, (50,), generator=draw) for length in (rows, columns))
    across = resample._weights((columns - width) // 2, width, size, columns, height % 2 == 0)
    down = resample._weights(rows - height, height, size, rows)
    kernel = resample._kernel(torch.device("cuda"), rows, columns) or resample._resample
    assert (kernel is resample._resample) == (max(rows, columns) > 64)
    on_device = kernel(images.cuda(), across.cuda(), down.cuda())
    assert torch.equal(on_device.cpu(), resample._resample(images, across, down))
