"""Grad-CAM on rare test images: the rule that chooses them, what is drawn and said, the page and the command."""

import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

from batchformer.analysis import grad_cam
from batchformer.analysis.drawing import MORE, TILE, captioned, text_width
from batchformer.analysis.rare_images import draw_explained, explain, rare_images, usual_layer
from batchformer.cli import main
from batchformer.data import DigitsLT
from batchformer.data.sets import write_miniature
from batchformer.errors import UserError
from batchformer.tasks import LongTailed

COUNTS = [200, 150, 90, 60, 30, 19, 12, 8, 5, 3]
LABELS = np.arange(60) % 10


class TestRule:
    def test_classes_with_few_images_where_there_are_enough_of_them(self):
        for seed in range(5):
            chosen = rare_images(COUNTS, LABELS, count=4, seed=seed)
            classes = LABELS[chosen].tolist()
            assert len(set(classes)) == 4
            assert set(classes) <= {5, 6, 7, 8, 9}
            assert classes == sorted(classes)  # the most frequent first
        assert len({tuple(rare_images(COUNTS, LABELS, 4, seed).tolist()) for seed in range(5)}) > 1
        assert np.array_equal(rare_images(COUNTS, LABELS, 4, 3), rare_images(COUNTS, LABELS, 4, 3))

    def test_else_the_rarest_and_of_too_few_classes_several_images(self):
        assert set(LABELS[rare_images(COUNTS, LABELS, count=8)]) == set(range(2, 10))
        twice = rare_images([500, 400], np.array([0, 1, 0, 1, 1]), count=4)
        assert sorted(np.array([0, 1, 0, 1, 1])[twice]) == [0, 0, 1, 1]
        assert len(set(twice.tolist())) == 4
        assert len(rare_images([500, 400], np.array([0, 1]), count=8)) == 2

    def test_classes_without_a_test_image_are_passed_over(self):
        labels = LABELS[LABELS != 9]
        assert 9 not in labels[rare_images(COUNTS, labels, count=5)]


@pytest.mark.parametrize("on_device", [True, False])
def test_chosen_samples_are_those_of_the_set(on_device):
    data = DigitsLT(on_device=on_device, eval_batch_size=64)
    loader = data.evaluation_loader("val")
    images, labels = (torch.cat([batch[key] for batch in loader]) for key in ("images", "labels"))
    batch = loader.batch_of(np.array([200, 3, 17]))
    assert torch.equal(batch["images"], images[[200, 3, 17]])
    assert torch.equal(batch["labels"], labels[[200, 3, 17]])


def test_maps_are_of_the_true_class_and_words_are_what_the_network_says():
    data, task = DigitsLT(), LongTailed("resnet20", {"widths": [8, 8]})
    task.construct(data.info)
    chosen = rare_images(data.class_counts, data.set_labels["val"])
    found = explain(task, data, chosen)
    batch = data.evaluation_loader("val").batch_of(chosen)
    torch.testing.assert_close(found.maps, grad_cam(task.net, batch["images"], "layer2", batch["labels"]))
    assert found.layer == "layer2"
    assert found.classes == [str(label) for label in batch["labels"].tolist()]
    with torch.no_grad():
        assert found.predicted == [str(label) for label in task.net.eval()(batch["images"]).argmax(1).tolist()]
    assert task.training
    sheet = draw_explained({"one": found, "other": found})
    orange = (np.asarray(sheet) == np.array(MORE)).all(-1)
    assert orange.any() == (found.predicted != found.classes)


@pytest.mark.parametrize("train", ["experts", "router"])
def test_maps_of_ride_are_of_the_experts_that_an_image_passes(train):
    data = DigitsLT()
    task = LongTailed("resnet20", {"widths": [8, 16]}, "baseline", algorithm="ride", ride={"train": train})
    task.construct(data.info)
    chosen = rare_images(data.class_counts, data.set_labels["val"])
    batch, paths = data.evaluation_loader("val").batch_of(chosen), [f"experts.{k}.layer2" for k in range(3)]
    net = task.net.eval()
    if train == "router":
        with torch.no_grad():
            scores = net.with_all_experts(batch["images"])[1][:, 0].sort().values
            net.router.score.bias -= scores[3:5].mean()  # half of the images leave after one expert
            used = net.routed(batch["images"])[1].tolist()
            assert 1 in used
            assert len(set(used)) > 1
    expected = torch.cat(
        [
            grad_cam(net, image[None], paths, label[None])
            for image, label in zip(batch["images"], batch["labels"], strict=True)
        ]
    )
    found = explain(task, data, chosen)
    torch.testing.assert_close(found.maps, expected)
    assert len(found.maps) == len(chosen)
    assert found.layer == "layer2 of the experts"


@pytest.mark.parametrize(
    ("name", "options", "layer"),
    [
        ("resnet18", {}, "layer3"),
        ("vit_tiny_patch16_224", {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 2},
         "blocks.1.norm1"),
        ("mobilenetv3_small_050", {}, "conv_head"),
    ],
)  # fmt: skip
def test_the_usual_layer_gives_maps(name, options, layer):
    net = timm.create_model(name, num_classes=3, **options)
    images = torch.randn(2, 3, 64 if not options else 32, 64 if not options else 32)
    found = usual_layer(net, images)
    if layer != "conv_head":
        assert found == layer
    assert grad_cam(net, images, found).shape[1] > 1


def test_a_network_without_maps_is_refused():
    with pytest.raises(UserError, match="name one"):
        usual_layer(nn.Sequential(nn.Flatten(), nn.Linear(48, 2)), torch.zeros(1, 3, 4, 4))


def test_a_caption_is_cut_to_the_width_of_its_tile():
    shown = captioned(Image.new("RGB", (TILE, TILE)), "a name that is much too long for a tile", MORE)
    assert shown.width == TILE
    assert shown.height > TILE
    ink = (np.asarray(shown)[TILE:] == np.array(MORE)).all(-1).any(0)
    assert 0 < ink.argmax() < TILE
    assert text_width("a name that is much too long for a tile", 18) > TILE


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    words = ["--trainer.max_epochs", "1", "--model.schedule.warmup_epochs", "0"]
    for method in ("baseline", "batchformer"):
        assert main(["fit", "digits-lt", "--method", method, *words, "--out", str(folder / method)]) == 0
    return folder


class TestCommand:
    def test_two_runs_side_by_side(self, runs, tmp_path, capsys):
        out = tmp_path / "looks.png"
        assert main(["grad-cam", str(runs / "baseline"), str(runs / "batchformer"), "--out", str(out)]) == 0
        said = capsys.readouterr().out
        assert "baseline, seed 0: " in said
        assert "batchformer, seed 0: " in said
        assert "classes of 7 to " in said
        assert "drawn by seed 0" in said
        words = ["--data.imbalance", "1", "--trainer.limit_train_batches", "1", "--epochs", "1", "--no-analysis"]
        assert main(["fit", "digits-lt", *words, "--out", str(tmp_path / "balanced")]) == 0
        assert main(["grad-cam", str(runs / "baseline"), str(tmp_path / "balanced"), "--out", str(out)]) == 0
        assert "classes of 7 to " in capsys.readouterr().out  # of the run that the images were chosen by
        two = Image.open(out)
        assert main(["grad-cam", str(runs / "baseline"), "--out", str(out), "--images", "3"]) == 0  # ours: replaced
        one = Image.open(out)
        assert two.height > one.height
        assert two.width > one.width
        Image.new("RGB", (2, 2)).save(out)
        assert main(["grad-cam", str(runs / "baseline"), "--out", str(out)]) == 2
        assert "was not written by this command" in capsys.readouterr().err
        assert Image.open(out).size == (2, 2)

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ([], "needs run folders"),
            (["RUN", "--out", "picture.jpg"], "must end in .png"),
            (["RUN", "--layer", "layer9"], "--layer layer9: CifarResNet has no such submodule. Did you mean layer1?"),
            (["RUN", "--images", "0"], "expected 1 or more"),
            (["nowhere"], "There is no run folder nowhere"),
        ],
    )
    def test_mistakes_are_one_sentence(self, runs, tmp_path, monkeypatch, capsys, words, said):
        monkeypatch.chdir(tmp_path)
        assert main(["grad-cam", *(str(runs / "baseline") if word == "RUN" else word for word in words)]) == 2
        assert said in capsys.readouterr().err
        assert not list(tmp_path.iterdir())

    def test_other_test_images_do_not_compare(self, runs, tmp_path, capsys):
        words = ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "1", "--trainer.accelerator", "cpu"]
        root = ["--data-root", str(write_miniature("folder", tmp_path / "photos")), "--data.image_size", "32"]
        assert main(["fit", "folder-lt", *root, *words, "--data.batch_size", "8", "--model.backbone", "resnet10t",
                     "--init-from", "scratch",
                     "--data.workers", "0", "--no-analysis", "--out", str(tmp_path / "other")]) == 0  # fmt: skip
        assert (
            main(["grad-cam", str(runs / "baseline"), str(tmp_path / "other"), "--out", str(tmp_path / "a.png")]) == 2
        )
        assert "they cannot be compared" in capsys.readouterr().err
        assert main(["grad-cam", str(tmp_path / "other"), "--out", str(tmp_path / "a.png")]) == 0  # of files, too


def test_a_run_leaves_its_picture_for_the_page_and_overwriting_removes_it(runs, tmp_path):
    listed = json.loads((runs / "baseline/grad_cam/pictures.json").read_text())
    assert [entry["file"] for entry in listed] == ["grad-cam.png"]
    assert "drawn by seed 0" in listed[0]["caption"]
    assert main(["report", str(runs), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert page.count("<h3>Grad-CAM on rare classes, ") == 2
    assert page.count("data:image/png;base64") == 4  # beside each the worst mistakes
    words = ["--trainer.max_epochs", "1", "--model.schedule.warmup_epochs", "0", "--no-analysis", "--overwrite"]
    assert main(["fit", "digits-lt", *words, "--out", str(runs / "baseline")]) == 0
    assert not (runs / "baseline/grad_cam").exists()
