"""Batch attention of detectors over real positions, and the sheets that show it."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import batchformer as bf
from batchformer.analysis.batch_attention import (
    attention_over_batch,
    attention_over_scenes,
    attention_weights,
    inside_images,
    objects_and_background,
    on_objects,
)
from batchformer.analysis.drawing import PAPER, write_index
from batchformer.analysis.features import features_over_scenes
from batchformer.analysis.pictures import draw_features
from batchformer.errors import UserError
from tests.attach.small_detectors import BUILD, HEIGHT, WIDTH, batch

NAMES = ["a", "b", "c"]
_SPEC = importlib.util.spec_from_file_location(
    "detection_pictures_example", Path(__file__).parents[2] / "examples" / "detection_pictures.py"
)
example = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = example  # where its dataclass looks for its own module
_SPEC.loader.exec_module(example)


@pytest.fixture(scope="module", params=["detr", "deformable", "segmentation"])
def attached(request):
    model = BUILD[request.param]().eval()
    bf.attach(model, encoder_layers=[0], heads=4, mask_padding=request.param == "deformable")
    return request.param, model


def test_attention_is_that_of_the_module_on_the_cells_of_the_largest_map(attached):
    kind, model = attached
    given = batch(kind, count=3)
    seen = []
    module = model.batchformer[0]
    handle = module.layers[0].self_attn.register_forward_pre_hook(lambda _, args: seen.append(args))
    attention = attention_over_scenes(model, given["pixel_values"], given["pixel_mask"])
    handle.remove()
    stride = 8 if kind == "deformable" else 32
    assert attention.layout.grid == (HEIGHT // stride, WIDTH // stride)
    cells = attention.layout.positions
    x, valid = seen[-1][0], seen[-1][1] if len(seen[-1]) > 1 else None
    expected = attention_weights(module.layers[0].self_attn, x, valid)[:cells].mean(1)
    torch.testing.assert_close(attention.weights, expected)
    assert not model.training


def test_features_are_those_of_the_encoder_layer_in_a_plain_pass_and_behind_the_module(attached):
    kind, model = attached
    given = batch(kind, count=3)
    images = given["pixel_values"], given["pixel_mask"]
    found = features_over_scenes(model, *images)
    attachment, seen = bf.attachment_of(model), []
    related = model.batchformer[0].layers[-1]
    layer = model.get_submodule(attachment.paths[0])
    hooks = [each.register_forward_hook(lambda _, args, out: seen.append(out)) for each in (layer, related)]
    with torch.no_grad(), attachment.disabled():
        model(*images)
    with torch.no_grad(), attachment.infer_with_batch():
        model(*images)
    for hook in hooks:
        hook.remove()
    plain, with_module = (out[0] if isinstance(out, tuple) else out for out in seen[:2])
    cells = found.layout.positions
    torch.testing.assert_close(found.without, plain[:, :cells])
    torch.testing.assert_close(found.related, with_module[:, :cells])
    assert not torch.allclose(found.related, found.without)
    if kind == "deformable":
        assert features_over_scenes(model, *images, level=1).layout.grid == (4, 6)
    assert not model.training


def test_padding_has_no_part_in_the_colours_of_features(attached):
    kind, model = attached
    given = batch(kind, count=2)
    found = features_over_scenes(model, given["pixel_values"], given["pixel_mask"])
    assert not found.inside.all()
    before, pictures = found.colours(), example.without_padding(given, None, None)
    drawn = np.asarray(draw_features(found, pictures))
    padding = ~found.inside.flatten(1)
    found.without = found.without.masked_fill(padding[..., None], 1e4)
    found.related = found.related.masked_fill(padding[..., None], -1e4)
    for old, new in zip(before, found.colours(), strict=True):
        torch.testing.assert_close(old[found.inside], new[found.inside])
    assert np.array_equal(np.asarray(draw_features(found, pictures)), drawn)


def test_features_of_a_detector_are_drawn_cut_to_the_images(attached):
    kind, model = attached
    picture, caption = example.features_picture(model, batch(kind, count=2))
    assert bf.attachment_of(model).paths[0] in caption
    second = np.asarray(picture)[:, 28 + 170 : 28 + 170 + 160]  # half as wide as the canvas: in the middle of its tile
    for row in range(3):
        tile = second[14 + 46 + row * 216 :][:160]
        assert (tile[:, :5] == PAPER).all()
        assert not (tile[:, 70:90] == PAPER).all()


def test_levels_of_deformable_detr_and_errors(attached):
    kind, model = attached
    given = batch(kind, count=2)
    images = given["pixel_values"], given["pixel_mask"]
    if kind == "deformable":
        assert attention_over_scenes(model, *images, level=1).layout.grid == (4, 6)
    with pytest.raises(UserError, match="feature maps"):
        attention_over_scenes(model, *images, level=4)
    with pytest.raises(UserError, match="two or more"):
        attention_over_scenes(model, images[0][:1])
    for keywords, words in [
        ({"place": 3}, "place=3"),
        ({"place": "nowhere"}, "no module is attached at 'nowhere'"),
        ({"layer": 2}, "1 layers"),
        ({"level": "largest"}, "level='largest' must be a whole number"),
    ]:
        with pytest.raises(UserError, match=words):
            attention_over_scenes(model, *images, **keywords)
    by_path = attention_over_scenes(model, *images, place=bf.attachment_of(model).paths[0])
    assert torch.equal(by_path.weights, attention_over_scenes(model, *images).weights)


def test_tokens_of_several_maps_are_not_taken_for_one(attached):
    kind, model = attached
    found = attention_over_batch(model, batch(kind, count=2)["pixel_values"])
    assert found.layout.grid == (None if kind == "deformable" else (HEIGHT // 32, WIDTH // 32))


def test_objects_and_background_are_told_apart_and_padding_counts_nowhere():
    boxes = [np.array([[0.0, 0.0, 32.0, 32.0]]), np.zeros((0, 4))]
    inside = inside_images((4, 4), (64, 64), [(64, 64), (64, 32)])
    objects = on_objects((4, 4), (64, 64), boxes)
    assert objects[0].sum() == 4
    assert not objects[1].any()
    assert inside.sum() == 16 + 8
    mass = torch.ones(2, 4, 4)
    mass[0, :2, :2], mass[1, :, 2:] = 3.0, 99.0
    found = objects_and_background(mass, objects, inside)
    assert (found.objects, found.background, found.ratio) == (3.0, 1.0, 3.0)


def test_the_picture_of_a_batch_has_its_numbers_in_the_caption(attached):
    kind, model = attached
    given = batch(kind, count=2)
    picture, caption, numbers = example.batch_attention_picture(model, given)
    assert f"{numbers.objects:.3f}" in caption
    assert picture.width > 700
    without = {**given, "labels": None}
    _, caption, numbers = example.batch_attention_picture(model, without)
    assert numbers is None
    assert "Mean on objects" not in caption


def test_stuff_is_background(attached):
    kind, model = attached
    given = batch(kind, count=2)
    given["labels"] = [
        {"class_labels": torch.tensor([2, 0]), "boxes": torch.tensor([[0.5, 0.5, 1.0, 1.0], [0.3, 0.3, 0.6, 0.6]])}
        for _ in range(2)
    ]
    assert example.batch_attention_picture(model, given)[2] is None  # nothing is left beside them
    things = example.batch_attention_picture(model, given, is_thing=[True, True, False])[2]
    assert things is not None
    assert things.objects != things.background


def test_a_padded_image_is_shown_without_its_padding(attached):
    """The second image is half as wide as the canvas, so it is upright, in the middle of its column."""
    kind, model = attached
    picture, _, _ = example.batch_attention_picture(model, {**batch(kind, count=2), "labels": None})
    pixels = np.asarray(picture)
    second = pixels[100:200, 28 + 390 : 28 + 390 + 380]
    assert (second[:, :5] == PAPER).all()
    assert not (second[:, 150:230] == PAPER).all()


def test_columns_stand_side_by_side_and_low_scores_are_not_drawn():
    pictures = [Image.new("RGB", (600, 400), (90, 90, 90))] * 2
    truth = [{"boxes": np.array([[10.0, 10.0, 200.0, 200.0]]), "labels": np.array([1])}] * 2
    unsure = [{**one, "scores": np.array([0.2])} for one in truth]
    assert np.array_equal(np.asarray(example.draw_objects(pictures[0], unsure[0], NAMES)), np.asarray(pictures[0]))
    sheet = example.draw_side_by_side(pictures, {"annotated": truth, "baseline": unsure}, NAMES)
    left, right = np.asarray(sheet.crop((28, 80, 408, 300))), np.asarray(sheet.crop((418, 80, 798, 300)))
    assert (right == 90).all()
    assert not (left == 90).all()
    with pytest.raises(UserError, match="one for each"):
        example.draw_side_by_side(pictures, {"annotated": truth[:1]}, NAMES)


def test_the_index_keeps_what_was_drawn_before(tmp_path):
    picture = Image.new("RGB", (9, 9))
    write_index(tmp_path, [("a.png", picture, "A", "old"), ("b.png", picture, "B", "")])
    write_index(tmp_path, [("a.png", picture, "A", "new")])
    index = json.loads((tmp_path / "pictures.json").read_text())
    assert [(entry["file"], entry["caption"]) for entry in index] == [("a.png", "new"), ("b.png", "")]


@pytest.mark.parametrize("content", ["{", "3", '["a.png"]', '[{"title": "A"}]'])
def test_an_index_that_is_none_is_left_as_it_is(tmp_path, content):
    (tmp_path / "pictures.json").write_text(content)
    with pytest.raises(UserError, match="not an index of pictures"):
        write_index(tmp_path, [("a.png", Image.new("RGB", (9, 9)), "A", "")])
    assert [path.name for path in tmp_path.iterdir()] == ["pictures.json"]
    with pytest.raises(UserError, match="cannot be written to"):
        write_index(tmp_path / "pictures.json", [("a.png", Image.new("RGB", (9, 9)), "A", "")])
