"""Batches for detectors: targets, augmentation with boxes, padding, order and resumption."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors

from batchformer.data import CocoDetection, CocoPanoptic, VocDetection
from batchformer.data.augment.detection import RandomSizedCrop, training_transform
from batchformer.data.loading.samples import seeded
from batchformer.data.sets import write_miniature
from batchformer.data.sets.boxes import collate_detection
from batchformer.errors import UserError

SMALL = {"image_size": 48, "batch_size": 4, "workers": 0}
KINDS = {"coco": CocoDetection, "coco-panoptic": CocoPanoptic, "voc": VocDetection}


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    return {name: str(write_miniature(name, tmp_path_factory.mktemp(name) / "data")) for name in KINDS}


@pytest.fixture(params=list(KINDS))
def make(request, roots):
    return lambda **options: KINDS[request.param](roots[request.param], **SMALL | options)


def pixel_boxes(label, size="size"):
    height, width = label[size].tolist()
    centre, extent = label["boxes"].double().split(2, 1)
    return torch.cat([centre - extent / 2, centre + extent / 2], 1) * torch.tensor([width, height, width, height])


def same(one, two):
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(two) and all(map(same, one, two))
    return torch.equal(one, two)


def test_batches_train_the_detectors_of_transformers(make):
    transformers = pytest.importorskip("transformers")
    data = make()
    batch = next(iter(data.train_dataloader()))
    config = transformers.DetrConfig(
        backbone="resnet18", use_timm_backbone=True, use_pretrained_backbone=False, d_model=16, num_queries=7,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
        decoder_ffn_dim=16, num_labels=data.num_classes, id2label=data.id2label,
    )  # fmt: skip
    outputs = transformers.DetrForObjectDetection(config)(**batch)
    assert outputs.loss.isfinite()
    assert outputs.pred_boxes.shape == (4, 7, 4)


def test_evaluation_targets_are_the_annotations(make):
    for batch in make(batch_size=3, eval_batch_size=3).val_dataloader():
        for label in batch["labels"]:
            truth = label["truth"]
            counted = ~truth["iscrowd"] & ~truth["ignore"]
            assert label["class_labels"].tolist() == truth["labels"][counted].tolist()
            scale = (label["size"] / label["orig_size"]).flip(0).repeat(2).double().numpy()
            # a resized segment ends at a whole pixel
            allowed = 1.5 if "segments_info" in truth else 0.01
            np.testing.assert_allclose(pixel_boxes(label).numpy(), truth["boxes"][counted] * scale, atol=allowed)


def test_images_are_padded_below_and_at_the_right(make):
    batch = next(iter(make(pad_multiple=32).train_dataloader()))
    pixels, mask = batch["pixel_values"], batch["pixel_mask"]
    assert pixels.shape[2] % 32 == pixels.shape[3] % 32 == 0
    sizes = torch.stack([label["size"] for label in batch["labels"]])
    assert len(sizes.unique(dim=0)) > 1
    assert (sizes.amax(0) > torch.tensor(pixels.shape[2:]) - 32).all()
    for image, valid, (height, width) in zip(pixels, mask, sizes.tolist(), strict=True):
        assert valid[:height, :width].all()
        assert valid.sum() == height * width
        assert not image[:, valid == 0].any()
        assert (image[:, :height, :width] != 0).float().mean() > 0.9


def test_the_order_and_the_augmentation_depend_on_seed_epoch_and_index_alone(make):
    first = make()
    epochs = [list(first.train_dataloader()), list(make().train_dataloader())]
    assert same(*epochs)
    loader = make(workers=2).train_dataloader()
    assert same(epochs[0], list(loader))
    later = list(loader)  # the next epoch
    assert not same(later, epochs[0])
    assert not same(list(make(seed=1).train_dataloader()), epochs[0])
    ids = [label["image_id"].item() for batch in later for label in batch["labels"]]
    assert len(set(ids)) == len(ids) == 24
    of_image = {label["image_id"].item(): label for batch in epochs[0] for label in batch["labels"]}
    assert any(not same(label, of_image[label["image_id"].item()]) for batch in later for label in batch["labels"])


def test_in_the_middle_of_an_epoch_it_goes_on_with_the_next_batch(make):
    first, second = make(), make()
    iterator = iter(first.train_dataloader())
    for _ in range(2):
        next(iterator)
    second.load_state_dict(first.state_dict())
    assert same(list(second.train_dataloader()), list(iterator))


def test_processes_share_the_images(make, monkeypatch):
    seen = []
    for rank in range(2):
        data = make()
        monkeypatch.setattr(data, "_rank_and_world", lambda rank=rank: (rank, 2))
        for loader in (data.train_dataloader(), data.val_dataloader()):
            seen.append([label["image_id"].item() for batch in loader for label in batch["labels"]])
    (train, val), (train_of_other, val_of_other) = seen[:2], seen[2:]
    assert len(train) == len(train_of_other) == 12
    assert len({*train, *train_of_other}) == 24
    assert len({*val, *val_of_other}) == len(val) + len(val_of_other) == 8


def test_resuming_with_other_boxes_is_refused(roots):
    state = CocoDetection(roots["coco"], **SMALL)
    state.setup()
    other = CocoDetection(roots["coco"], limit_train=20, **SMALL)
    other.load_state_dict(state.state_dict())
    with pytest.raises(UserError, match="fingerprint"):
        other.setup()


def test_boxes_and_masks_follow_the_pixels():
    """A white rectangle on black: wherever it goes, its box and its mask go."""
    transform = training_transform("detr", 400, None, None, (0, 0, 0), (1, 1, 1))
    pixels = np.zeros((300, 420, 3), np.uint8)
    pixels[60:200, 90:290] = 255
    box = tv_tensors.BoundingBoxes([[90.0, 60, 290, 200]], format="XYXY", canvas_size=(300, 420))
    mask = tv_tensors.Mask(torch.from_numpy(pixels[None, :, :, 0] > 0).to(torch.uint8))
    shapes, corners = set(), set()
    for seed in range(24):
        with seeded(seed):
            made = transform({"image": Image.fromarray(pixels), "boxes": box, "segments": mask})
        bright = made["image"][0] > 0.5
        rows, columns = bright.any(1).nonzero()[:, 0], bright.any(0).nonzero()[:, 0]
        extent = torch.stack([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]).float()
        assert (made["boxes"][0] - extent).abs().max() <= 2
        assert (made["segments"][0].bool() != bright).float().mean() < 0.02
        shapes.add(tuple(made["image"].shape[-2:]))
        corners.add(tuple(extent.tolist()))
    assert len(shapes) > 12
    assert len(corners) > 12
    assert all(min(shape) <= 400 and max(shape) <= 667 for shape in shapes)


def test_published_sizes_are_in_proportion_to_the_image_size():
    published, half = (str(training_transform("detr", size, None, None, (0,) * 3, (1,) * 3)) for size in (800, 400))
    for text in ("min_size=[480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800], max_size=1333", "[400, 500, 600]"):
        assert text in published
    assert "min_size=[240, 256, 272, 288, 304, 320, 336, 352, 368, 384, 400], max_size=666" in half
    own = str(training_transform("detr", 400, 500, [320, 400], (0,) * 3, (1,) * 3))
    assert "min_size=[320, 400], max_size=500" in own


def test_crops_are_of_the_sizes_named_and_within_the_image():
    crop = RandomSizedCrop(20, 40)
    columns = torch.arange(100.0).expand(3, 30, 100)
    shapes, lefts, rights = set(), set(), set()
    for seed in range(40):
        with seeded(seed):
            made = crop(tv_tensors.Image(columns))
        shapes.add(tuple(made.shape[-2:]))
        lefts.add(made[0, 0, 0].item())
        rights.add(made[0, 0, -1].item())
    assert min(lefts) < 20
    assert max(rights) > 80
    heights, widths = ({shape[axis] for shape in shapes} for axis in (0, 1))
    assert min(heights) >= 20 and max(heights) == 30  # noqa: PT018
    assert min(widths) >= 20 and max(widths) <= 40  # noqa: PT018
    assert len(widths) > 10


def test_a_crop_without_objects_is_a_target_without_boxes():
    label = {"boxes": torch.zeros(0, 4), "masks": torch.zeros(0, 5, 6, dtype=torch.bool)}
    other = {"boxes": torch.zeros(1, 4), "masks": torch.ones(1, 7, 3, dtype=torch.bool)}
    batch = collate_detection([(torch.ones(3, 5, 6), label), (torch.ones(3, 7, 3), other)], multiple=4)
    assert batch["pixel_values"].shape == (2, 3, 8, 8)
    assert [label["masks"].shape for label in batch["labels"]] == [(0, 8, 8), (1, 8, 8)]
    assert batch["labels"][1]["masks"].sum() == 21


def test_channels_last_changes_the_memory_only(roots):
    plain, last = (
        next(iter(CocoDetection(roots["coco"], channels_last=flag, **SMALL).train_dataloader()))
        for flag in (False, True)
    )
    assert last["pixel_values"].is_contiguous(memory_format=torch.channels_last)
    assert same(plain, last)


def test_what_a_user_shows_is_resized_as_in_evaluation(roots):
    data = CocoDetection(roots["coco"], **SMALL, eval_batch_size=1)
    batch = next(iter(data.val_dataloader()))
    path = data._scenes["val"].path(0)
    assert torch.equal(data.predict_transform(Image.open(path)), batch["pixel_values"][0])


@pytest.mark.parametrize("size", [(900, 1), (1, 900)])
def test_of_a_long_and_narrow_image_a_pixel_is_left(roots, size):
    data = CocoDetection(roots["coco"], **SMALL)
    assert min(data.predict_transform(Image.new("RGB", size)).shape) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 0}, r"data\.image_size must be at least 1"),
        ({"std": (0.2, 0.0, 0.2)}, r"data\.std, .* above 0"),
        ({"scales": []}, r"data\.scales must be at least 1"),
        ({"max_size": 20}, r"data\.max_size, the longest side, must be at least data\.image_size, got 20 and 48"),
        ({"pad_multiple": 0}, r"data\.pad_multiple"),
        ({"limit_train": 0}, r"data\.limit_train"),
    ],
)
def test_wrong_sizes_are_named(options, message):
    with pytest.raises(UserError, match=message):
        CocoDetection("anywhere", **SMALL | options)
