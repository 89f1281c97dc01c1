"""From a folder of pictures to a result: the check, the short options, the tuner, the choice of a checkpoint."""

import json
import math
import re
import shutil

import pytest
import torch
import yaml

from batchformer.cli import main
from batchformer.cli.arguments import read_arguments
from batchformer.cli.training import COMMON, recipe_overrides
from batchformer.data.sets import write_miniature
from batchformer.errors import UserError
from batchformer.runs.checkpoints import LastCheckpoint
from batchformer.runs.tuning import learning_rate, steepest
from batchformer.tasks import LongTailed
from batchformer.training.weights import read_checkpoint

from ..tasks.conftest import TinyData

QUICK = ["--init-from", "scratch", "--model.backbone", "resnet20", "--data.image_size", "16", "--data.workers", "0",
         "--batch-size", "16", "--device", "cpu", "--trainer.precision", "32-true", "--no-analysis",
         "--trainer.enable_progress_bar", "false"]  # fmt: skip


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_miniature("folder", tmp_path_factory.mktemp("own") / "photos")


@pytest.fixture
def here(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(photos, "photos")
    return tmp_path


class TestCheck:
    def test_errors_have_an_exit_code_a_page_and_a_way_out(self, say, here):
        code, out, _ = say("data", "folder-lt", "--data-root", "photos", "--check")
        assert code == 0
        assert re.match(r"folder-lt: 320 train, \d+ val images in photos\n  widths +\d+ to \d+, .*\n  heights ", out)
        assert "\nNo errors\n" in out
        (here / "photos/train/class_0/<b>.jpg").write_bytes(b"no image")
        shutil.copy("photos/val/class_1/0000.jpg", "photos/train/class_1/leaked.jpg")
        code, out, _ = say("data", "folder-lt", "--data-root", "photos", "--check")
        assert code == 1
        assert "error: damaged files: 1 (left out by --skip-bad)\n  train/class_0/<b>.jpg: cannot be read" in out
        assert "train/class_1/leaked.jpg and val/class_1/0000.jpg" in out
        assert "note: classes of fewer than 20" in out
        assert "batchformer fit folder-lt --data-root photos --skip-bad" in out
        page = (here / "runs/folder-lt/data-check.html").read_text()
        assert "train/class_0/&lt;b&gt;.jpg" in page
        assert "http" not in page.partition("<style>")[0]
        assert say("report", "runs/folder-lt")[0] == 2  # no run yet, and the file of the check is none

        told = say("fit", "folder", "--data-root", "photos", *QUICK, "--skip-bad")[2]
        assert "there is no file runs/folder/data-check.json" in told  # of another recipe
        fit = ["fit", "folder-lt", "--data-root", "photos", *QUICK, "--epochs", "1", "--out", "run"]
        code, _, err = say(*fit)
        assert code == 2
        assert "<b>.jpg cannot be read" in err
        with pytest.warns(UserWarning, match="2 files are left out"):
            assert say(*fit, "--skip-bad")[0] == 0
        assert json.loads((here / "run/result.json").read_text())["data"]["train_images"] == 320
        assert "--skip-bad" in json.loads((here / "run/result.json").read_text())["command"]

    def test_the_way_out_has_the_fields_that_were_given(self, say, here):
        shutil.rmtree("photos/val")
        (here / "photos/train/class_0/b.jpg").write_bytes(b"no image")
        out = say("data", "folder", "--data-root", "photos", "--data.val_fraction", "0.2", "--check")[1]
        assert "fit folder --data-root photos --data.val_fraction 0.2 --skip-bad" in out

    def test_out_chooses_the_folder(self, say, here):
        code, out, _ = say("data", "folder", "--data-root", "photos", "--check", "--out", "seen")
        assert (code, sorted(file.name for file in (here / "seen").iterdir())) == (
            0,
            ["data-check.html", "data-check.json"],
        )
        assert "seen/data-check.html" in out


class TestShortOptions:
    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            (["--epochs", "3", "--lr", "0.1"], [("trainer.max_epochs", "3"), ("model.optimizer.lr", "0.1")]),
            (["--batch-size", "8"], [("data.init_args.batch_size", "8")]),
            (["--device", "cpu"], [("trainer.accelerator", "cpu"), ("trainer.devices", "1")]),
            (["--device", "cuda"], [("trainer.accelerator", "gpu"), ("trainer.devices", "1")]),
            (["--device", "cuda:1"], [("trainer.accelerator", "gpu"), ("trainer.devices", "[1]")]),
            (["--device", "0,1"], [("trainer.accelerator", "gpu"), ("trainer.devices", "[0,1]")]),
            (["--device", "auto"], [("trainer.accelerator", "auto"), ("trainer.devices", "auto")]),
            (["--init-from", "scratch"], [("run.init_from", "{}")]),
            (["--init-from", "backbone=scratch"], [("run.init_from.backbone", "null")]),
            (["--best"], [("data.init_args.holdout", "0.1"), ("run.best", "true")]),
            (["--early-stop", "4"], [("data.init_args.holdout", "0.1"), ("run.early_stop", "4")]),
            (["--data.batch_size", "5", "--batch-size", "3"],
             [("data.init_args.batch_size", "3"), ("data.batch_size", "5")]),
        ],
    )  # fmt: skip
    def test_they_stand_for_fields(self, given, expected):
        assert recipe_overrides(read_arguments(["folder", *given], COMMON, recipe_keys=True)) == expected

    def test_other_weights_take_the_place_of_pretrained_ones_in_the_arguments_of_the_backbone(self):
        none = ("model.backbone_args.pretrained", "false")
        for source in ("scratch", "FILE", "backbone=FILE"):
            given = read_arguments(["folders-domains", "--init-from", source], COMMON, recipe_keys=True)
            assert recipe_overrides(given)[-1] == none
        given = read_arguments(["folders-domains", "--epochs", "3"], COMMON, recipe_keys=True)
        assert none not in recipe_overrides(given)

    def test_they_reach_the_run(self, here, tmp_path):
        words = ["fit", "folder", "--data-root", "photos", *QUICK, "--epochs", "1", "--lr", "0.003", "--out", "run"]
        assert main([*words, "--trainer.limit_train_batches", "1"]) == 0
        config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
        assert (config["trainer"]["max_epochs"], config["trainer"]["accelerator"]) == (1, "cpu")
        assert (config["model"]["optimizer"]["lr"], config["data"]["init_args"]["batch_size"]) == (0.003, 16)
        assert config["run"]["init_from"] == {}


class TestChoice:
    def test_the_card_of_an_export_says_of_which_epoch_the_numbers_are(self, say, chosen, run, tmp_path):
        assert say("export", run, "--format", "folder", "--out", tmp_path / "net")[0] == 0
        when = f"fter epoch {chosen['chosen']['epoch'] + 1} of {chosen['epochs']}, the best on the holdout images"
        assert f"A{when}, on the test images" in (tmp_path / "net/README.md").read_text()
        assert say("test", run)[1].splitlines()[0].endswith(f"a{when}")

    def test_a_resumed_run_chooses_the_same(self, chosen, photos, tmp_path, monkeypatch):
        save = LastCheckpoint.on_train_epoch_end

        def save_and_stop(*given):
            save(*given)
            raise KeyboardInterrupt

        words = [*self.words(photos), "--out", str(tmp_path / "run")]
        with monkeypatch.context() as patch:
            patch.setattr(LastCheckpoint, "on_train_epoch_end", save_and_stop)
            assert main(words) == 130
        assert main([*words, "--resume"]) == 0
        again = json.loads((tmp_path / "run/result.json").read_text())
        for key in ("metrics", "chosen", "history", "per_class", "epochs"):
            assert again[key] == chosen[key], key

    @staticmethod
    def words(photos):
        return ["fit", "folder", "--data-root", str(photos), *QUICK, "--epochs", "4", "--lr", "0.02",
                "--best", "--early-stop", "1", "--data.holdout", "0.2"]  # fmt: skip

    @pytest.fixture(scope="class")
    def run(self, photos, tmp_path_factory):
        out = tmp_path_factory.mktemp("chosen") / "run"
        assert main([*self.words(photos), "--out", str(out)]) == 0
        return out

    @pytest.fixture
    def chosen(self, run):
        return json.loads((run / "result.json").read_text())

    def test_the_best_epoch_on_the_held_out_images_is_reported(self, say, chosen, run, photos, tmp_path):
        by_epoch = {entry["epoch"]: entry for entry in chosen["history"]}
        best = max(by_epoch.values(), key=lambda entry: (entry["holdout/top1"], -entry["epoch"]))
        assert chosen["chosen"]["epoch"] == best["epoch"]
        assert chosen["metrics"]["top1"] == pytest.approx(best["top1"])
        assert chosen["protocol"] == "best on holdout"
        for name, step in (("best", chosen["chosen"]["step"]), ("last", chosen["steps"])):
            assert read_checkpoint(run / f"checkpoints/{name}.ckpt")["global_step"] == step
        code, out, err = say("test", run)
        assert code == 0, err
        assert f"after epoch {best['epoch'] + 1} of {chosen['epochs']}, the best on the holdout images" in out
        assert "result.json has exactly these numbers" in out
        assert say("predict", run, photos / "val/class_0", "--out", tmp_path / "seen.csv")[0] == 0
        assert say("export", run, "--out", tmp_path / "model.safetensors")[0] == 0

    def test_it_ends_when_the_held_out_images_get_no_better(self, chosen):
        scores = [entry["holdout/top1"] for entry in chosen["history"]]
        worse = [k for k in range(1, len(scores)) if scores[k] <= max(scores[:k])]
        assert chosen["epochs"] == (worse[0] + 1 if worse else 4)


class OwnGroups(LongTailed):
    """Its learning rate is `scale` times that of the options; of two groups the first has one weight."""

    def configure_optimizers(self):
        one, *others = self.net.parameters()
        members = [[one], others] if len(self.factors) > 1 else [[one, *others]]
        rate = self.scale * self.optimizer_options.lr
        groups = [
            {"params": some, "lr_factor": f, "lr": f * rate} for some, f in zip(members, self.factors, strict=True)
        ]
        return torch.optim.SGD(groups)


class TestTuner:
    def test_the_rate_where_the_loss_falls_most_per_factor_is_taken(self):
        rates = [10 ** (k / 10 - 5) for k in range(50)]
        losses = [2 / (1 + math.exp(4 * (math.log10(rate) + 3))) + max(0, rate - 0.1) * 50 for rate in rates]
        assert steepest(rates, losses) == pytest.approx(1e-3)
        falling = [3.0] * 20 + [2.9, 2.6, 1.0] + [9.0] * 27  # what comes after the minimum does not count
        assert steepest(rates, falling) == pytest.approx(rates[22])
        with pytest.raises(UserError, match="the loss did not fall"):
            steepest(rates, [float(k) for k in range(50)])
        assert steepest(rates, [math.nan if k > 40 else loss for k, loss in enumerate(losses)]) == pytest.approx(1e-3)

    @pytest.mark.filterwarnings("ignore")
    def test_the_scaling_of_the_rate_and_groups_that_stand_still_do_not_change_the_answer(self, tmp_path):
        def found(scale, *factors):
            task = OwnGroups("resnet20", {"widths": [4, 4]}, method="baseline")
            task.scale, task.factors = scale, factors
            return learning_rate((task, TinyData(), {"accelerator": "cpu"}, None), tmp_path, 0.1, 15)

        assert found(4.0, 0.0, 1.0) == pytest.approx(found(1.0, 1.0) / 4)
        with pytest.raises(UserError, match="trains at a learning rate of 0"):
            found(1.0, 0.0)

    def test_it_prints_the_options_of_fit_and_keeps_nothing(self, say, here):
        words = ["tune", "folder-lt", "--data-root", "photos", *QUICK, "--steps", "30"]
        code, out, err = say(*words)
        assert code == 0, err
        assert 1e-8 < float(out.split("--lr ")[-1]) <= 1
        assert "Next: batchformer fit folder-lt --data-root photos --init-from scratch" in out
        code, out, err = say(*words, "--find", "batch-size", "--batch-size", "128")
        assert code == 0, err
        assert out.startswith("batch size:     256,")  # doubled once: there are 320 images
        assert out.rstrip().endswith("--batch-size 256")
        assert [file.name for file in here.iterdir()] == ["photos"]
