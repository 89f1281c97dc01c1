"""The pictures show what the arrays say, at the right place and in the right colour."""

import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import batchformer as bf
from batchformer.analysis.batch_attention import AttentionOverBatch
from batchformer.analysis.drawing import INK, MARGIN, TILE, contact_sheet, heat_over, tile, tint, to_pictures
from batchformer.analysis.features import FeaturePair
from batchformer.analysis.pictures import draw_plane, draw_who_looks_at_whom, on_sheet, shown_of, write_pictures
from batchformer.errors import UserError
from batchformer.nn.token_layout import TokenLayout

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)


def test_normalised_images_come_back_as_they_were():
    pixels = torch.randint(0, 256, (2, 3, 5, 7), dtype=torch.uint8)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (MEAN, STD))
    pictures = to_pictures((pixels / 255 - mean) / std, MEAN, STD)
    for picture, wanted in zip(pictures, pixels, strict=True):
        assert np.array_equal(np.asarray(picture), wanted.permute(1, 2, 0).numpy())


def test_images_that_are_none_are_refused():
    with pytest.raises(UserError, match="cannot be drawn"):
        to_pictures(torch.zeros(2, 5, 8, 8))
    with pytest.raises(UserError, match="one tensor with the whole batch, not ndarray"):
        to_pictures(np.zeros((2, 3, 8, 8)))


@pytest.mark.parametrize(
    ("statistics", "words"),
    [
        ({"mean": MEAN}, "belong together"),
        ({"mean": MEAN, "std": (0.2, 0.3)}, "3 and 2 numbers and the images 3 channels"),
        ({"mean": MEAN, "std": 0.0}, "std=0.0 must be"),
    ],
)
def test_statistics_that_do_not_fit_are_refused(statistics, words):
    with pytest.raises(UserError, match=words):
        to_pictures(torch.zeros(2, 3, 8, 8), **statistics)


def test_a_heading_is_whole_over_a_single_tile():
    words = "a heading that is longer than the tile below it"
    narrow, wide = (
        np.asarray(contact_sheet([(words, [Image.new("RGB", (TILE, TILE))] * count)])).astype(int) for count in (1, 5)
    )
    ink = [np.nonzero((abs(sheet - INK).max(-1) < 60).any(0))[0] for sheet in (narrow, wide)]
    assert ink[0].max() == ink[1].max() < narrow.shape[1] - MARGIN // 2


def test_images_in_the_order_of_their_classes_are_drawn_of_all_of_them():
    assert shown_of(3) == [0, 1, 2]
    classes = [k // 6 for k in range(24)]
    assert [classes[k] for k in shown_of(24)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_heat_is_warm_where_others_look_more_and_cold_where_less():
    mass = torch.ones(4, 4)
    mass[0, 0], mass[3, 3] = 2.0, 0.5
    grey = Image.new("RGB", (64, 64), (128, 128, 128))
    shown = np.asarray(heat_over(grey, mass, limit=1.0)).astype(int)
    assert shown[4, 4, 0] > shown[4, 4, 2] + 100
    assert shown[60, 60, 2] > shown[60, 60, 0] + 100
    assert np.ptp(shown[4, 60]) <= 1  # as by chance: grey


def test_tints_grow_with_the_factor():
    warm = [tint(factor, 1.0)[0] - tint(factor, 1.0)[2] for factor in (0.5, 0.8, 1.0, 1.3, 2.0, 9.0)]
    assert warm == sorted(warm)
    assert warm[2] == 0
    assert warm[-1] == warm[-2]


def test_a_wide_picture_is_whole_on_its_tile():
    shown = np.asarray(tile(Image.new("RGB", (80, 40), (255, 0, 0))))
    assert shown.shape == (TILE, TILE, 3)
    red = (shown == (255, 0, 0)).all(-1)
    assert red.any(1).sum() == TILE // 2
    assert red[TILE // 2].all()


def test_the_table_marks_the_patch_and_tints_its_cells():
    weights = torch.full((8, 2, 2), 0.5)
    weights[5] = torch.tensor([[0.3, 0.7], [0.5, 0.5]])
    attention = AttentionOverBatch("blocks.0", weights, TokenLayout(8, 0, (2, 4)))
    colours = [(0, 0, 90), (0, 90, 0)]
    pictures = [Image.new("RGB", (64, 32), colour) for colour in colours]
    sheet = np.asarray(draw_who_looks_at_whom(attention, pictures, (1, 1))).astype(int)
    plain = np.asarray(draw_who_looks_at_whom(attention, pictures, 0)).astype(int)
    assert abs(sheet - plain).max() > 50
    warm, cold = (np.argwhere(sheet[..., a] - sheet[..., b] > 100) for a, b in ((0, 2), (2, 0)))
    left, top = 28 + 104 + 12, 28 + 46 + 104 + 12
    cell = sheet[top + 10, left + 10]
    assert cell[2] > cell[0] + 100  # looks less at itself
    cell = sheet[top + 10, left + 104 + 10]
    assert cell[0] > cell[2] + 50  # more at the other
    assert np.ptp(sheet[top + 104 + 10, left + 10]) <= 1  # the second looks at both alike
    for k, colour in enumerate(colours):  # each picture before its row and above its column
        assert tuple(sheet[top + 104 * k + 36, 28 + 70]) == colour
        assert tuple(sheet[28 + 46 + 36, left + 104 * k + 70]) == colour
    # "is looked at" above the pictures of the columns, "looks" in their line before them
    for words, middle in ((sheet[: 28 + 46, left:], 28 + 46 // 2 - 6), (sheet[:top, :left], 28 + 46 + 104 // 2)):
        lines = np.nonzero((abs(words - INK).max(-1) < 60).any(1))[0]
        assert lines.mean() == pytest.approx(middle, abs=5)
    assert len(warm)
    assert len(cold)
    # The frame around patch (1, 1) of a 4 x 2 grid on a tile of 96 with a picture of 96 x 48 in its middle.
    frame = sheet[28 + 46 : 28 + 46 + 96, left : left + 96]
    rows, columns = np.nonzero(frame[..., 0] > 200)
    assert (rows.min(), rows.max()) == pytest.approx((48, 72), abs=2)
    assert (columns.min(), columns.max()) == pytest.approx((24, 48), abs=2)


def test_the_plane_has_one_scale_for_both_directions():
    torch.manual_seed(0)
    points = torch.randn(6, 2) * torch.tensor([40.0, 3.0])
    placed = on_sheet(points, (1000, 700))
    scale = torch.pdist(placed) / torch.pdist(points)
    torch.testing.assert_close(scale, scale[:1].expand_as(scale))
    assert placed.amin() > 0
    assert placed[:, 0].max() < 1000
    assert placed[:, 1].max() < 700
    assert placed[points[:, 1].argmax(), 1] == placed[:, 1].min()  # upwards


def test_classes_have_their_colours_whatever_the_labels_come_in():
    torch.manual_seed(0)
    features = FeaturePair("blocks.0", torch.randn(4, 1, 8), torch.randn(4, 1, 8), TokenLayout(1, 0, None))
    wanted = np.asarray(draw_plane(features, [0, 1, 1, 0]))
    for labels in (torch.tensor([0, 1, 1, 0]), np.array([0, 1, 1, 0]), ("a", "b", "b", "a")):
        assert np.array_equal(np.asarray(draw_plane(features, labels)), wanted)
    with pytest.raises(UserError, match="3 labels for 4 images"):
        draw_plane(features, [0, 1, 2])


def test_colours_of_features_reach_from_none_to_full():
    torch.manual_seed(0)
    features = FeaturePair("blocks.0", torch.randn(40, 16, 8), torch.randn(40, 16, 8), TokenLayout(16, 0, (4, 4)))
    both = torch.stack(features.colours())
    assert both.shape == (2, 40, 4, 4, 3)
    for channel in both.unbind(-1):
        assert (channel.min(), channel.max()) == (0, 1)
        assert 0.01 < (channel == 1).float().mean() < 0.03  # the brightest 2 % are full


@pytest.fixture
def vit():
    torch.manual_seed(0)
    shape = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **shape)


def test_all_pictures_are_written_with_an_index(vit, tmp_path):
    bf.attach(vit, blocks=[0], heads=2)
    images = torch.randn(9, 3, 32, 32)
    state, random = {k: v.clone() for k, v in vit.state_dict().items()}, torch.get_rng_state()
    written = write_pictures(tmp_path / "pictures", vit, images, labels=[k % 3 for k in range(9)])
    index = json.loads((tmp_path / "pictures" / "pictures.json").read_text())
    assert [tmp_path / "pictures" / entry["file"] for entry in index] == written
    assert [path.name for path in written] == [
        "attention-mass.png",
        "features.png",
        "who-looks-at-whom.png",
        "plane.png",
    ]
    for path in written:
        assert np.asarray(Image.open(path)).std() > 5
    assert all("blocks.0" in entry["caption"] and entry["title"] for entry in index)
    assert vit.training
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(state[k], v) for k, v in vit.state_dict().items())


def test_a_pooled_feature_gets_the_pictures_that_need_no_grid(vit, tmp_path):
    bf.attach(vit, heads=2)
    written = write_pictures(tmp_path, vit, torch.randn(3, 3, 32, 32))
    assert [path.name for path in written] == ["who-looks-at-whom.png", "plane.png"]


def test_the_captions_say_where_the_module_stands_and_how_many_images_are_drawn(vit, tmp_path):
    bf.attach(vit, heads=2)
    write_pictures(tmp_path, vit, torch.randn(9, 3, 32, 32), position=np.int64(0))
    captions = [entry["caption"] for entry in json.loads((tmp_path / "pictures.json").read_text())]
    assert all(caption.startswith("Before 'head'. ") for caption in captions)
    assert "At position 0, counted" in captions[0]
    assert "8 of 9 images" in captions[0]


def test_what_cannot_be_drawn_leaves_nothing_behind(vit, tmp_path):
    bf.attach(vit, blocks=[0], heads=2)
    images = torch.randn(4, 3, 32, 32)
    (tmp_path / "file").write_text("mine")
    for folder, keywords, words in [
        ("out", {"labels": [0, 1]}, "2 labels for 4 images"),
        ("out", {"position": (9, 9)}, "no patch"),
        ("out", {"mean": MEAN}, "belong together"),
        ("file", {}, "cannot be written to"),
        ("file/inside", {}, "cannot be written to"),
    ]:
        with pytest.raises(UserError, match=words):
            write_pictures(tmp_path / folder, vit, images, **keywords)
    with pytest.raises(UserError, match="NaN"):
        write_pictures(tmp_path / "out", vit, images * float("nan"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"
