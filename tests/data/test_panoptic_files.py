"""COCO's panoptic files: segments become boxes and masks, and what is wrong in them is named."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from batchformer.data import CocoDetection, CocoPanoptic
from batchformer.data.sets import write_miniature
from batchformer.data.sets.coco_panoptic import colours_of_ids, ids_of_colours, read_segment_ids, write_segment_ids
from batchformer.errors import UserError
from batchformer.metrics import CocoAP, PanopticQuality

SMALL = {"image_size": 48, "batch_size": 4, "workers": 0}
TRAIN = "annotations/panoptic_train2017.json"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write_miniature("coco-panoptic", tmp_path_factory.mktemp("panoptic") / "data")


@pytest.fixture
def root(original, tmp_path):
    return shutil.copytree(original, tmp_path / "coco")


def data(root, **options):
    made = CocoPanoptic(str(root), **SMALL | options)
    made.setup()
    return made


def edit(root, change):
    content = json.loads((root / TRAIN).read_text())
    change(content)
    (root / TRAIN).write_text(json.dumps(content))


def test_ids_and_colours_are_each_others_inverse():
    ids = np.array([[0, 1, 255], [256, 65535, 65536], [2**24 - 1, 70_001, 8_345_037]])
    assert np.array_equal(ids_of_colours(colours_of_ids(ids)), ids)
    assert colours_of_ids(np.array([[3 + 256 * 5 + 65536 * 7]])).tolist() == [[[3, 5, 7]]]


def test_things_and_stuff(original):
    made = data(original)
    assert made.category_ids == [1, 3, 17, 44, 90, 187, 193]
    assert made.is_thing == [True] * 5 + [False] * 2
    official = data(original, labels="official")
    assert official.num_classes == 194
    assert [k for k, thing in enumerate(official.is_thing) if thing] == [1, 3, 17, 44, 90]


@pytest.mark.parametrize("part", ["train", "val"])
def test_masks_are_the_segments_without_crowds_and_boxes_surround_them(original, part):
    made = data(original, augment="none", eval_batch_size=3)
    content = json.loads((original / TRAIN.replace("train", part)).read_text())
    entries = {entry["image_id"]: entry for entry in content["annotations"]}
    for batch in made.evaluation_loader(part):
        canvas = tuple(batch["pixel_values"].shape[-2:])
        for label in batch["labels"]:
            entry = entries[label["image_id"].item()]
            ids = read_segment_ids(original / f"panoptic_{part}2017" / entry["file_name"])
            kept = [info for info in entry["segments_info"] if not info["iscrowd"]]
            assert label["masks"].shape == (len(kept), *canvas)
            height, width = label["size"].tolist()
            assert not label["masks"][:, height:].any()
            assert not label["masks"][:, :, width:].any()
            for info, mask, box in zip(kept, label["masks"], label["boxes"], strict=True):
                resized = Image.fromarray(ids == info["id"]).resize((width, height), Image.Resampling.NEAREST)
                assert (np.asarray(resized) != mask[:height, :width].numpy()).mean() < 0.05
                rows, columns = mask.any(1).nonzero()[:, 0], mask.any(0).nonzero()[:, 0]
                centre = torch.stack([columns[0] + columns[-1] + 1, rows[0] + rows[-1] + 1]) / 2
                assert torch.allclose(box[:2] * torch.tensor([width, height]), centre, atol=1e-4)
            assert label["area"].tolist() == label["masks"].sum((1, 2)).tolist()


def test_the_truth_is_the_segmentation_of_the_original(original):
    made = data(original)
    quality, precision = PanopticQuality(made.is_thing), CocoAP(made.num_classes)
    crowds = 0
    for batch in made.val_dataloader():
        truths = [label["truth"] for label in batch["labels"]]
        crowds += sum(info["iscrowd"] for truth in truths for info in truth["segments_info"])
        for label, truth in zip(batch["labels"], truths, strict=True):
            assert truth["segmentation"].shape == tuple(label["orig_size"].tolist())
            counts = np.bincount(truth["segmentation"].reshape(-1))
            assert [info["area"] for info in truth["segments_info"]] == counts[1:].tolist()
        quality.update([{key: truth[key] for key in ("segmentation", "segments_info")} for truth in truths], truths)
        precision.update([truth | {"scores": np.ones(len(truth["labels"]))} for truth in truths], batch["labels"])
    assert crowds == 1
    assert quality.compute()["pq"] == 1
    assert precision.compute()["ap"] == pytest.approx(1)


def test_the_boxes_of_the_truth_are_those_of_the_instances_where_nothing_covers_them(original):
    panoptic, instances = data(original), CocoDetection(str(original), **SMALL)
    instances.setup()
    boxes = [{tuple(box) for box in made._scenes["val"].boxes.tolist()} for made in (panoptic, instances)]
    assert len(boxes[0] & boxes[1]) >= 5


def test_without_masks_the_targets_are_those_of_a_detector(original):
    with_masks, without = (next(iter(data(original, masks=flag).train_dataloader())) for flag in (True, False))
    assert torch.equal(with_masks["pixel_values"], without["pixel_values"])
    for one, two in zip(with_masks["labels"], without["labels"], strict=True):
        assert one.keys() - two.keys() == {"masks"}
        assert torch.equal(one["boxes"], two["boxes"])


def test_the_mask_head_of_transformers_trains_on_padded_batches(original):
    transformers = pytest.importorskip("transformers")
    made = data(original, pad_multiple=64, augment="none")
    batch = next(iter(made.train_dataloader()))
    config = transformers.DetrConfig(
        backbone="resnet18", use_timm_backbone=True, use_pretrained_backbone=False, d_model=128, num_queries=9,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=16,
        decoder_ffn_dim=16, num_labels=made.num_classes,
    )  # fmt: skip
    outputs = transformers.DetrForSegmentation(config)(**batch)
    assert outputs.loss_dict["loss_mask"].isfinite()
    assert outputs.loss_dict["loss_dice"].isfinite()


def sentence(root):
    with pytest.raises(UserError) as caught:
        list(data(root, drop_last=False).train_dataloader())
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("part", ["train2017", "panoptic_val2017", TRAIN])
def test_a_missing_part_is_named(root, part):
    place = root / part
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    assert str(place) in sentence(root)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["annotations"][1].update(image_id=5), "names image 5, which the file does not list"),
        (lambda c: c["annotations"][1]["segments_info"][0].update(category_id=2), "names category 2"),
        (lambda c: c["annotations"][1]["segments_info"][0].update(id=4), "has a segment 70002 that"),
        (lambda c: c["annotations"][1]["segments_info"][0].pop("bbox"), "segment 70002 has no 'bbox'"),
        (lambda c: c["annotations"][1]["segments_info"][0].update(bbox=[1, 2, 3]), "not [x, y, width, height]"),
        (lambda c: c["annotations"][1]["segments_info"][0].update(area="x"), "the area of annotation 70002 of"),
        (lambda c: c["annotations"][1].update(segments_info=[7]), "is not a list of segments"),
        (lambda c: c["annotations"][1].pop("segments_info"), "has no 'segments_info'"),
        (lambda c: c["annotations"].append(c["annotations"][0]), "an image has two annotations"),
    ],
)
def test_what_is_wrong_in_the_annotations_is_named(root, change, message):
    edit(root, change)
    assert message in sentence(root)


def test_a_segmentation_that_does_not_fit_its_image_is_named(root):
    file = json.loads((root / TRAIN).read_text())["annotations"][0]["file_name"]
    path = root / "panoptic_train2017" / file
    write_segment_ids(path, np.zeros((5, 7), dtype=np.int64))
    assert f"segmentation {path} is 7 x 5 pixels" in sentence(root)
    path.unlink()
    assert f"image {path} does not exist" in sentence(root)


@pytest.mark.parametrize("part", ["images", "annotations"])
def test_a_file_outside_the_root_is_refused_and_named(part, root):
    edit(root, lambda content: content[part][2].update(file_name="../../secret.png"))
    with pytest.raises(UserError, match=r"image \d+, names \.\./\.\./secret\.png, which is outside"):
        data(root)
