"""Folders of somebody's own images: other classes than in training, files that are no images, missing parts."""

import csv
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from batchformer.cli import main
from batchformer.errors import UserError
from batchformer.hub import refuse_unreachable
from batchformer.models.detector_backbone import load_backbone_weights
from batchformer.tasks.classification.mixing import load_extractor

SMALL = ["--model.backbone", "resnet20", "--data.image_size", "16", "--data.batch_size", "4", "--data.workers", "0",
         "--trainer.precision", "32-true", "--trainer.max_epochs", "1", "--no-analysis",
         "--init-from", "scratch"]  # fmt: skip
CLASSES = ("cat", "dog", "fox")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    draw = np.random.default_rng(0)
    for part, count in (("train", 4), ("val", 2)):
        for name in CLASSES:
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                image = Image.fromarray(draw.integers(0, 255, (16, 16, 3), dtype=np.uint8))
                image.save(root / part / name / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("own") / "run"
    assert main(["fit", "folder-lt", "--data-root", str(photos), *SMALL, "--out", str(out)]) == 0
    return out


@pytest.fixture
def copied(photos, tmp_path):
    return shutil.copytree(photos, tmp_path / "photos")


def rename(root, old, new):
    for part in ("train", "val"):
        (root / part / old).rename(root / part / new)


class TestClassNames:
    RENAMED = "(missing: cat (0); new: wolf (2); moved: dog (1 to 0), fox (2 to 1))"

    def test_test_names_what_differs_from_those_of_the_training(self, say, run, copied):
        rename(copied, "cat", "wolf")
        code, out, err = say("test", run, "--data-root", copied)
        assert (code, out) == (2, "")
        assert f"the classes of the data are not those of the training {self.RENAMED}" in err

    def test_a_class_that_is_gone_or_new_is_named(self, say, run, copied):
        shutil.copytree(copied / "train/cat", copied / "train/ant")
        assert (
            "(new: ant (0); moved: cat (0 to 1), dog (1 to 2) and 1 more)" in say("test", run, "--data-root", copied)[2]
        )
        for part in ("train/ant", "train/fox", "val/fox"):
            shutil.rmtree(copied / part)
        assert "(missing: fox (2))" in say("test", run, "--data-root", copied)[2]

    def test_predict_keeps_the_names_of_the_training_and_names_other_folders(self, say, run, copied, tmp_path):
        out = tmp_path / "seen.csv"
        assert "Note" not in say("predict", run, copied / "val", "--out", out)[1]
        rename(copied, "cat", "wolf")
        code, said, _ = say("predict", run, copied / "val", "--out", out)
        assert code == 0
        assert "no class of the training has the name of the folders wolf (its classes are cat, dog, fox)" in said
        with open(out, newline="") as file:
            assert {row[f"class_{k}"] for row in csv.DictReader(file) for k in (1, 2, 3)} == set(CLASSES)
        assert "Note" not in say("predict", run, copied / "val/wolf", copied, "--out", out)[1]  # no class folders

    def test_a_class_without_images_to_evaluate_on_is_no_other_class(self, say, run, copied):
        shutil.rmtree(copied / "val/fox")
        _, out, err = say("test", run, "--data-root", copied)
        assert "All" in out, err

    def test_a_run_goes_on_with_the_same_classes_only(self, say, run, copied, tmp_path):
        stopped = shutil.copytree(run, tmp_path / "stopped")
        (stopped / "result.json").unlink()
        fit = ("fit", "folder-lt", "--data-root", copied, *SMALL, "--out", stopped, "--resume")
        rename(copied, "cat", "wolf")
        code, _, err = say(*fit)
        assert code == 2
        assert self.RENAMED in err
        rename(copied, "wolf", "cat")
        assert say(*fit)[0] == 0


class TestUnreadable:
    @pytest.fixture
    def folder(self, copied):
        (copied / "val/dog/broken.jpg").write_bytes(b"no image")
        whole = (copied / "val/dog/0.png").read_bytes()
        (copied / "val/dog/cut.png").write_bytes(whole[: len(whole) // 2])
        return copied / "val"

    def test_one_image_does_not_cost_the_others(self, say, run, folder, tmp_path):
        code, out, err = say("predict", run, folder, "--out", tmp_path / "seen.csv")
        assert code == 1
        assert "6 images classified" in out
        assert "2 of 8 images could not be read" in err
        with open(tmp_path / "seen.csv", newline="") as file:
            rows = {row["path"].rsplit("/", 1)[1]: row for row in csv.DictReader(file) if "/dog/" in row["path"]}
        assert list(rows) == ["0.png", "1.png", "broken.jpg", "cut.png"]
        for name, row in rows.items():
            assert bool(row["class_1"]) == (not row["error"]) == name.startswith(("0", "1"))
        assert "broken.jpg cannot be read (cannot identify" in rows["broken.jpg"]["error"]

        whole, bad = tmp_path / "whole.csv", {folder / "dog/broken.jpg", folder / "dog/cut.png"}
        for image in bad:
            image.unlink()
        assert say("predict", run, folder, "--out", whole)[0] == 0
        kept = [line for line in (tmp_path / "seen.csv").read_text().splitlines() if "cannot" not in line]
        assert kept == whole.read_text().splitlines()  # rows belong to their images

    def test_strict_stops_at_the_first(self, say, run, folder, tmp_path):
        code, _, err = say("predict", run, folder, "--out", tmp_path / "seen.csv", "--strict")
        assert code == 2
        assert "broken.jpg cannot be read" in err
        assert not (tmp_path / "seen.csv").exists()


class TestPassedOver:
    @pytest.fixture
    def mixed(self, copied):
        for place in ("train/cat/notes.txt", "val/dog/more.txt", "train/fox/phone.heicx", "train/fox/.hidden"):
            (copied / place).write_bytes(b"")
        return copied

    TOLD = "3 files skipped: 2 .txt, 1 .heicx"

    def test_data_counts_files_that_are_no_images(self, say, mixed):
        code, out, _ = say("data", "folder-lt", "--data-root", mixed)
        assert code == 0
        assert f"note: {mixed}: {self.TOLD}\n" in out

    def test_training_says_it_once(self, say, mixed, tmp_path):
        compared = ["--seeds", "2", "--variant", "one:", "--trainer.limit_train_batches", "1"]
        with pytest.warns(UserWarning, match=self.TOLD) as told:
            assert say("compare", "folder-lt", "--data-root", mixed, *SMALL, *compared, "--out", tmp_path / "r")[0] == 0
        assert sum(self.TOLD in str(each.message) for each in told) == 1

    def test_a_folder_of_nothing_else_says_what_is_there(self, say, run, mixed):
        for file in (mixed / "train/fox").glob("*.png"):
            file.rename(file.with_suffix(".xyz"))
        assert "4 .xyz" in say("data", "folder-lt", "--data-root", mixed)[2]
        assert "5 files skipped: 4 .xyz, 1 .heicx" in say("predict", run, mixed / "train/fox")[2]


class TestParts:
    @pytest.mark.parametrize("other", ["test", "validation"])
    def test_a_folder_in_the_place_of_val_is_named(self, say, copied, other):
        (copied / "val").rename(copied / other)
        code, _, err = say("data", "folder-lt", "--data-root", copied)
        assert code == 2
        assert f"rename {copied / other} to val" in err

    def test_without_any_it_says_what_to_do(self, say, copied):
        shutil.rmtree(copied / "val")
        assert "move some images of each class there" in say("data", "folder-lt", "--data-root", copied)[2]

    def test_a_folder_called_test_is_said_to_be_of_no_use(self, say, copied):
        assert "not used" not in say("data", "folder-lt", "--data-root", copied)[1]
        shutil.copytree(copied / "val", copied / "test")
        assert f"{copied / 'test'} is not used: results are those on val" in say(
            "data", "folder-lt", "--data-root", copied
        )[1]  # fmt: skip


class TestTrying:
    def test_a_fast_dev_run_goes_through_and_keeps_nothing(self, say, photos, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        words = ["folder-lt", "--data-root", photos, *SMALL, "--trainer.fast_dev_run", "true"]
        code, out, err = say("fit", *words)
        assert code == 0, err
        assert "nothing was kept" in out
        assert not list(tmp_path.iterdir())
        assert "try one out with batchformer fit" in say("compare", *words)[2]
        assert not list(tmp_path.glob("runs/*/*"))

    @pytest.mark.parametrize(
        ("option", "told"),
        [
            ("--dry-run", "--trainer.fast_dev_run true"),
            ("--dry_run", "keeps nothing"),
        ],
    )
    def test_options_known_from_elsewhere_name_ours(self, say, option, told):
        code, _, err = say("fit", "digits-lt", option)
        assert code == 2
        assert f"There is no {option}: " in err
        assert told in err


class TestNoNetwork:
    @pytest.fixture
    def waits(self, monkeypatch, tmp_path):
        """The Hub is at a closed port; returns the waits of its client."""
        import huggingface_hub.utils._http as http
        from huggingface_hub import constants

        seen = []
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        nowhere = "http://127.0.0.1:9"
        monkeypatch.setattr(constants, "ENDPOINT", nowhere)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", nowhere + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(http.time, "sleep", seen.append)
        return seen

    def test_recipes_that_begin_with_weights_say_how_to_get_them_before_torch_is_imported(self, photos, tmp_path):
        """A fresh process: what it imports is part of what is tested."""
        code = (
            "import sys; from batchformer.cli import main; "
            "code = main(['fit', sys.argv[1], '--data-root', sys.argv[2], '--out', 'run']); "
            "print(code, 'torch' in sys.modules)"
        )
        offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
        for recipe, way_out in (
            ("folder-lt", "--init-from FILE"),
            ("folders-domains", "--init-from FILE"),
            ("folder-detection", "--init-from backbone=FILE"),
            ("pacs-128", "no pretrained weights of resnet50_stride_in_1x1 to fetch"),
            ("pacs-128-adapt", "no pretrained weights of resnet50_stride_in_1x1 to fetch"),
        ):
            done = subprocess.run(
                [sys.executable, "-c", code, recipe, str(photos)],
                capture_output=True, text=True, env=offline, cwd=tmp_path,
            )  # fmt: skip
            assert done.stdout == "2 False\n", done.stderr
            assert way_out in done.stderr
            assert "--init-from scratch" in done.stderr
        assert not (tmp_path / "run").exists()

    def test_weights_in_the_cache_are_looked_for_by_timm(self, waits, tmp_path):
        refused = pytest.raises(UserError, match=r"127\.0\.0\.1 cannot be reached")
        with refused:
            refuse_unreachable("resnet18")
        (tmp_path / "cache/models--timm--resnet18d.ra2_in1k").mkdir(parents=True)
        with refused:
            refuse_unreachable("resnet18")
        (tmp_path / "cache/models--timm--resnet18.a1_in1k").mkdir()
        refuse_unreachable("resnet18")

    def test_pretrained_weights_are_told_to_be_out_of_reach_without_a_wait(self, say, photos, tmp_path, waits):
        given = [*SMALL, "--model.backbone", "resnet18", "--model.backbone_args.pretrained", "true"]
        code, _, err = say("fit", "folder-lt", "--data-root", photos, *given, "--out", tmp_path / "run")
        assert code == 2
        assert "model.backbone_args.pretrained_cfg_overlay.file" in err
        assert not (tmp_path / "run").exists()
        assert waits == []

    def test_so_are_those_of_detectors_and_extractors(self, waits):
        for fetch, way_out in (
            (lambda: load_backbone_weights(None, "resnet18", "pretrained"), "--init-from backbone=FILE"),
            (lambda: load_extractor("resnet18"), "--model.mix.extractor_checkpoint FILE"),
        ):
            with pytest.raises(UserError, match=way_out):
                fetch()
        assert waits == []
