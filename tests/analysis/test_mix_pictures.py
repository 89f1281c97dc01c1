"""The picture of a mixed batch says what was mixed and how the labels were divided."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import batchformer as bf
from batchformer.analysis import mix_pictures
from batchformer.analysis.drawing import LESS, MORE
from batchformer.analysis.mix_pictures import draw_mixed, label_shares, write_mix_picture
from batchformer.errors import UserError

IMAGES = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(4)


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_classes=4)


def coloured(picture, colour):
    """Pixels of exactly this colour: bars, nothing else is drawn in it so widely."""
    return int((np.asarray(picture) == np.array(colour)).all(-1).sum())


def test_shares_by_area_attention_and_in_the_target(vit):
    generator = torch.Generator().manual_seed(1)
    with bf.mix.TransMix(vit, 4, attention_weight=0.25, per_sample=True, generator=generator) as mix:
        mixed = mix(IMAGES, LABELS)
        vit(mixed.images)
    shares = label_shares(mixed)
    torch.testing.assert_close(shares["target"], 0.75 * shares["area"] + 0.25 * shares["attention"])
    assert list(label_shares(bf.mix.CutMix(4)(IMAGES, LABELS))) == ["area", "target"]


def test_bars_are_as_long_as_the_shares(vit):
    black = torch.zeros(2, 3, 32, 32)
    seen = []
    for share in (0.25, 0.75):
        mixed = bf.mix.Mixed(black, torch.eye(2), torch.tensor([1, 0]), torch.full((2,), share))
        picture = draw_mixed(mixed, black, mean=(0.0,) * 3, std=(1.0,) * 3)
        seen.append(coloured(picture, MORE) / (coloured(picture, MORE) + coloured(picture, LESS)))
    assert seen == pytest.approx([0.25, 0.75], abs=0.03)


def test_attention_has_its_column_and_every_method_its_picture(vit, tmp_path):
    plain = draw_mixed(bf.mix.CutMix(4)(IMAGES, LABELS), IMAGES, names=list("abcd"))
    with bf.mix.TransMix(vit, 4) as mix:
        mixed = mix(IMAGES, LABELS)
        with pytest.raises(UserError, match="attention of this batch is not there"):
            draw_mixed(mixed, IMAGES)
        vit(mixed.images)
    file = write_mix_picture(tmp_path / "mixing", mixed, IMAGES, names=["a long name of a class"] * 4)
    assert Image.open(file).width > plain.width
    for other in (bf.mix.Mixup(4), bf.mix.PuzzleMix(vit, 4), bf.mix.SaliencyMix(4)):
        assert draw_mixed(other(IMAGES, LABELS), IMAGES).size == plain.size
    with pytest.raises(UserError, match="pass the batch mixed"):
        draw_mixed(mixed, IMAGES[:2])


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path):
    images = torch.rand(2, 3, 16, 16)
    mixed = bf.mix.CutMix(2)(images, torch.tensor([0, 1]))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="cannot be written to"):
        write_mix_picture(tmp_path / "file", mixed, images)


def test_the_example_draws_own_images_by_any_method(tmp_path, monkeypatch):
    (tmp_path / "photos" / "cats").mkdir(parents=True)
    for k in range(3):
        Image.effect_noise((40, 30), 60 + 10 * k).convert("RGB").save(tmp_path / "photos" / "cats" / f"{k}.png")
    file = Path(__file__).parents[2] / "examples" / "mix_pictures.py"
    spec = importlib.util.spec_from_file_location("mix_pictures_example", file)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["example", *map(str, arguments)])
        example.main()

    for method, model in [("transmix", "test_vit"), ("attentive-cutmix", "test_resnet"), ("cutmix", "test_resnet")]:
        run(tmp_path / "photos", "--model", model, "--method", method, "--out", tmp_path / method)
        assert (tmp_path / method / "mixed.png").is_file()
    for wrong, words in [
        ([tmp_path / "nowhere"], "is not a folder"),
        ([tmp_path / "photos", "--images", 1], "two or more"),
        ([tmp_path / "photos", "--model", "none"], "timm has no model"),
        ([tmp_path / "photos", "--model", "test_resnet"], "use CutMix"),
    ]:
        with pytest.raises(UserError, match=words):
            run(*wrong)


EXAMPLE = Path(__file__).parents[2] / "examples" / "mix_pictures.py"


@pytest.mark.parametrize(
    ("files", "names"),
    [(("cat.png", "dog.png"), ["cat.png", "dog.png"]), (("cats/1.png", "dogs/1.png"), ["cats", "dogs"])],
    ids=("without-classes", "with-classes"),
)
def test_images_are_called_by_their_class_or_else_by_their_file(tmp_path, monkeypatch, files, names):
    for file in files:
        (tmp_path / "photos" / file).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (90, 60, 0)).save(tmp_path / "photos" / file)
    monkeypatch.chdir(tmp_path)
    shown: list[list[str]] = []
    monkeypatch.setattr(mix_pictures, "write_mix_picture", lambda *_, names, **__: shown.append(names))
    monkeypatch.setattr(sys, "argv", ["example", "photos", "--model", "test_resnet", "--method", "cutmix"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert shown == [names]


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("missing.pt", "there is no file missing.pt: "),
        ("other.pt", "other.pt does not hold the weights of a test_resnet"),
    ],
)
def test_weights_that_do_not_fit_are_told_in_a_sentence(tmp_path, monkeypatch, file, said):
    for name in ("cat.png", "dog.png"):
        (tmp_path / "photos").mkdir(exist_ok=True)
        Image.new("RGB", (40, 30), (90, 60, 0)).save(tmp_path / "photos" / name)
    torch.save({"weight": torch.ones(2)}, tmp_path / "other.pt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["example", "photos", "--model", "test_resnet", "--weights", file])
    with pytest.raises(SystemExit, match=said) as stopped:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "\n" not in str(stopped.value)
    assert not (tmp_path / "mixing").exists()
