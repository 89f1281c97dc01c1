"""The example draws a user's own images with any timm model, and says what is wrong. (tests/house runs it bare.)"""

import importlib.util
import sys
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import batchformer as bf
from batchformer.cli import main
from batchformer.errors import UserError

FILE = Path(__file__).parents[2] / "examples" / "batch_attention_pictures.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("batch_attention_pictures", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def photos(tmp_path):
    for k in range(6):
        folder = tmp_path / "photos" / ("cats", "dogs")[k % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((40, 30), 60 + 10 * k).convert("RGB").save(folder / f"{k}.png")
    return tmp_path / "photos"


@pytest.fixture
def run(example, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def called(*arguments):
        monkeypatch.setattr(sys, "argv", ["example", *map(str, arguments)])
        example.main()

    return called


def test_own_images_give_four_pictures(run, photos, tmp_path, capsys):
    run(photos, "--model", "test_vit", "--out", tmp_path / "seen")
    assert sorted(path.name for path in (tmp_path / "seen").glob("*.png")) == [
        "attention-mass.png",
        "features.png",
        "plane.png",
        "who-looks-at-whom.png",
    ]
    assert "random weights" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["attached", "plain", "lightning", "safetensors"])
def test_trained_weights_are_loaded_whatever_they_come_in(example, tmp_path, capsys, kind):
    torch.manual_seed(5)
    trained = timm.create_model("test_vit")
    attachment = bf.attach(trained, after="blocks.4", heads=2)
    state = attachment.detach().state_dict() if kind == "plain" else trained.state_dict()
    file = tmp_path / ("trained.safetensors" if kind == "safetensors" else "trained.pt")
    if kind == "safetensors":
        save_file(state, file)
    else:
        torch.save({"state_dict": {f"net.{k}": v for k, v in state.items()}} if kind == "lightning" else state, file)
    torch.manual_seed(6)
    net = example.attached_model("test_vit", "blocks.4", 2)
    example.load_weights(net, file)
    loaded = net.state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in state.items())
    assert ("no weights of the module" in capsys.readouterr().out) == (kind == "plain")


def test_weights_for_other_classes_are_loaded_but_for_the_classifier(example, tmp_path):
    trained = timm.create_model("test_vit", num_classes=7)
    bf.attach(trained, after="blocks.4", heads=2)
    torch.save(trained.state_dict(), tmp_path / "trained.pt")
    net = example.attached_model("test_vit", "blocks.4", 2)
    example.load_weights(net, tmp_path / "trained.pt")
    loaded = net.state_dict()
    assert all(torch.equal(loaded[k], v) for k, v in trained.state_dict().items() if not k.startswith("head."))


def test_photos_are_turned_as_their_cameras_noted(run, tmp_path):
    upright = Image.effect_noise((40, 60), 90).convert("RGB")
    note = Image.Exif()
    note[0x0112] = 6  # turn by a quarter, clockwise
    for name in ("upright", "phone"):
        (tmp_path / name).mkdir()
        upright.transpose(Image.Transpose.ROTATE_180).save(tmp_path / name / "other.png")
    upright.save(tmp_path / "upright" / "photo.png")
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "phone" / "photo.png", exif=note)
    for name in ("upright", "phone"):
        run(tmp_path / name, "--model", "test_vit", "--out", tmp_path / f"of {name}")
    one, other = ((tmp_path / f"of {name}" / "features.png").read_bytes() for name in ("upright", "phone"))
    assert one == other


def test_the_pictures_of_a_run_are_on_its_page(run, photos, tmp_path):
    small = {"model.backbone_args.depth": 1, "model.batchformer.blocks": [0], "model.schedule.warmup_epochs": 0}
    short = {"trainer.max_epochs": 1, "trainer.limit_train_batches": 1, "data.batch_size": 8}
    words = [str(word) for key, value in {**small, **short}.items() for word in (f"--{key}", value)]
    for method in ("baseline", "batchformer"):
        out = str(tmp_path / method)
        assert main(["fit", "vit-digits", *words, "--no-analysis", "--method", method, "--out", out]) == 0
    run(photos, "--run", tmp_path / "batchformer")
    assert main(["report", str(tmp_path / "batchformer"), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert page.count("data:image/png") == 4
    assert "After &#x27;blocks.0&#x27;." in page
    for arguments, sentence in [
        ([photos, "--run", tmp_path / "baseline"], "trained without the module"),
        ([photos, "--run", tmp_path / "batchformer", "--after", "blocks.0"], "leave out --after"),
        (["--run", tmp_path / "batchformer"], "needs a folder of images"),
    ]:
        with pytest.raises(UserError, match=sentence):
            run(*arguments)


def test_mistakes_are_named(run, photos, tmp_path):
    (tmp_path / "broken.pt").write_bytes(b"nothing")
    torch.save({"a": torch.zeros(1)}, tmp_path / "other.pt")
    torch.save([torch.zeros(1)], tmp_path / "list.pt")
    (tmp_path / "empty").mkdir()
    for arguments, words in [
        ([tmp_path / "nowhere"], "is not a folder"),
        ([tmp_path / "empty"], "holds 0 images"),
        ([photos, "--model", "vit_tiny_patch16_22"], "did you mean vit_tiny_patch16_224"),
        ([photos, "--model", "test_resnet"], "--after layer3"),
        ([photos, "--model", "test_vit", "--after", "blocks.77"], "blocks.77"),
        ([photos, "--model", "test_vit", "--weights", tmp_path / "broken.pt"], "cannot be read as weights"),
        ([photos, "--model", "test_vit", "--weights", tmp_path / "other.pt"], "does not fit"),
        ([photos, "--model", "test_vit", "--weights", tmp_path / "list.pt"], "no weights by name but a list"),
        ([photos, "--model", "test_vit", "--images", "1"], "two images or more"),
        ([photos, "--model", "test_vit", "--out", tmp_path / "broken.pt"], "cannot be written to"),
    ]:
        with pytest.raises(UserError, match=words):
            run(*arguments)
    (photos / "cats" / "0.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"0\.png"):
        run(photos, "--model", "test_vit")
