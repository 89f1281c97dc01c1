"""Any set of variants, several stages, and weights from elsewhere, from the command line."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file

from batchformer.cli import main
from batchformer.cli.recipe_cli import RecipeCLI
from batchformer.cli.training import RunMaker
from batchformer.tasks import TASKS

TINY = ["--model.backbone_args.widths", "[4,4]", "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "2",
        "--data.batch_size", "32", "--no-analysis"]  # fmt: skip
STILL = ["--model.optimizer.lr", "0", "--model.schedule.warmup_epochs", "0"]  # nothing that is trained moves


def result_of(run):
    return json.loads((run / "result.json").read_text())


def weights_of(run, part="net."):
    state = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    return {key: value for key, value in state.items() if key.startswith(part)}


def trained(state):
    """Without the statistics of BatchNorm, which move at any learning rate."""
    return {key: value for key, value in state.items() if "running" not in key and "num_batches" not in key}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    out = tmp_path_factory.mktemp("first") / "run"
    assert main(["fit", "digits-lt", *TINY, "--seed", "5", "--out", str(out)]) == 0
    return out


class TestVariants:
    @pytest.mark.parametrize("task", [task for task in TASKS if task not in ("linear_probe", "region_detection")])
    def test_every_task_is_compared_with_and_without_the_module_and_so_is_its_subclass(self, task, tmp_path):
        """Also where `method` and `seed` are options that a constructor passes on."""
        kind = TASKS[task]
        (tmp_path / f"mine_{task}.py").write_text(
            f"from {kind.__module__} import {kind.__name__}\n\n\nclass Mine({kind.__name__}):\n    pass\n"
        )
        for name in (task, f"mine_{task}.Mine"):
            recipe = tmp_path / "recipe.yaml"
            recipe.write_text(yaml.safe_dump({"task": name, "data": {"class_path": kind.data_class.__name__}}))
            cli = RecipeCLI()
            cli.load(recipe)
            assert list(cli.variants) == ["baseline", "batchformer"]

    def test_the_first_one_is_what_the_others_are_held_to(self, say, tmp_path):
        variants = [
            "two:model.batchformer.layers=2",
            "one:model.batchformer.layers=1,model.batchformer.heads=2",
            "none",
        ]
        variants[2] += ":model.method=baseline"
        words = [word for variant in variants for word in ("--variant", variant)]
        code, out, err = say("compare", "digits-lt", *words, *TINY, "--seeds", "2", "--out", tmp_path / "c")
        assert code == 0, err
        results = {path.name: result_of(path) for path in (tmp_path / "c").iterdir() if path.is_dir()}
        assert set(results) == {f"{name}-seed{seed}" for name in ("two", "one", "none") for seed in (0, 1)}
        assert {result["reference"] for result in results.values()} == {"two"}
        assert results["one-seed1"]["config"]["model"]["batchformer"]["heads"] == 2
        compared = json.loads((tmp_path / "c/compare.json").read_text())
        assert compared["variants"] == ["two", "one", "none"]
        heading = next(line for line in out.splitlines() if "two" in line and "none" in line)
        assert heading.index("two") < heading.index("one") < heading.index("none")
        means = {
            name: sum(results[f"{name}-seed{seed}"]["metrics"]["accuracy"] for seed in (0, 1))
            for name in compared["variants"]
        }
        assert f"export {tmp_path / 'c' / max(means, key=means.get)}-seed0 " in out

    def test_a_file_names_them_too(self, say, tmp_path):
        (tmp_path / "v.yaml").write_text("plain: {model.method: baseline}\nwide: {model: {batchformer: {heads: 2}}}\n")
        words = ["--variants", tmp_path / "v.yaml", *TINY, "--seeds", "1"]
        code, _, err = say("compare", "digits-lt", *words, "--out", tmp_path / "c")
        assert code == 0, err
        assert result_of(tmp_path / "c/plain-seed0")["config"]["model"]["method"] == "baseline"
        assert result_of(tmp_path / "c/wide-seed0")["config"]["model"]["batchformer"]["heads"] == 2

    @pytest.mark.parametrize(
        ("more", "name"),
        [
            ([], "four"),
            (["--model.batchformer.heads", "2"], "two"),
            (["--model.batchformer.heads", "1"], "batchformer"),
            (["--method", "baseline"], "baseline"),
            (["--variant", "two"], "two"),
        ],
    )
    def test_fit_names_what_it_trains(self, say, tmp_path, monkeypatch, more, name):
        """Without `--variant` the recipe as it is, which may be one of its variants."""
        monkeypatch.chdir(tmp_path)
        variants = {"two": {"model.batchformer.heads": 2}, "four": {"model.batchformer.heads": 4}}
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"extends": "digits-lt", "variants": variants}))
        trained = []
        monkeypatch.setattr(RunMaker, "train", lambda self, folder, *_: trained.append(folder) or 1 / 0)
        say("fit", "mine.yaml", *TINY, *more)
        assert [folder.path.name for folder in trained] == [f"{name}-seed0"]

    def test_fit_trains_one_by_its_name(self, say, tmp_path):
        code, _, err = say("fit", "digits-lt", "--variant", "baseline", *TINY, "--out", tmp_path / "run")
        assert code == 0, err
        assert result_of(tmp_path / "run")["variant"] == "baseline"
        assert not [key for key in weights_of(tmp_path / "run") if "batchformer" in key]

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["fit", "digits-lt", "--variant", "basline"], "Did you mean baseline?"),
            (["compare", "digits-lt", "--variant", "a:lr=3"], "expected name:key=value"),
            (
                ["compare", "digits-lt", "--variant", "basline"],
                "no variant basline. Did you mean baseline?",
            ),
            (
                ["compare", "digits-lt", "--variant", "x:model.method=baseline", "--variant", "y"],
                "has no variant y. There",
            ),
            (["compare", "digits-lt", "--variant", "a/b:model.seed=3"], "cannot name a run"),
            (["compare", "digits-lt", "--variants", "nowhere.yaml"], "cannot be read"),
            (["compare", "digits-lt", "--variants", "x.yaml", "--variant", "a"], "give only one of them"),
            (["compare", "digits-lt", "--targets", "all"], "has no targets"),
        ],
    )
    def test_a_wrong_call_is_told_in_one_sentence(self, say, words, told, tmp_path):
        code, _, err = say(*words, "--out", tmp_path / "out")
        assert code == 2
        assert told in err
        assert not (tmp_path / "out").exists()


class TestStages:
    @pytest.fixture
    def recipe(self, tmp_path):
        stages = [
            {"name": "features", "trainer.max_epochs": 2},
            {"name": "classifier", "model.optimizer.lr": 0.0, "model.loss.name": "cross_entropy"},
        ]
        file = tmp_path / "staged.yaml"
        file.write_text(yaml.safe_dump({"extends": "digits-lt", "stages": stages}))
        return file

    # not --trainer.max_epochs: what is given on the command line holds for every stage
    SMALL = ("--model.backbone_args.widths", "[4,4]", "--trainer.limit_train_batches", "2",
             "--model.schedule.warmup_epochs", "0", "--no-analysis")  # fmt: skip

    def test_each_begins_with_the_weights_of_the_one_before(self, say, recipe, tmp_path):
        out = tmp_path / "run"
        code, _, err = say("fit", recipe, *self.SMALL, "--out", out)
        assert code == 0, err
        earlier, last = out / ".stages/1-features", result_of(out)
        assert result_of(earlier)["config"]["trainer"]["max_epochs"] == 2
        assert last["config"]["model"]["loss"]["name"] == "cross_entropy"
        assert last["config"]["run"]["init_from"] == {"network": str(earlier)}
        found, expected = trained(weights_of(out)), trained(weights_of(earlier))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)

    def test_a_finished_stage_is_not_trained_again(self, say, recipe, tmp_path):
        out = tmp_path / "run"
        assert say("fit", recipe, *self.SMALL, "--out", out)[0] == 0
        written = (out / ".stages/1-features/result.json").stat().st_mtime_ns
        for name in ("result.json", "checkpoints/last.ckpt"):
            (out / name).unlink()
        assert say("fit", recipe, *self.SMALL, "--out", out, "--resume")[0] == 0
        assert (out / ".stages/1-features/result.json").stat().st_mtime_ns == written
        assert (out / "result.json").is_file()

    def test_weights_from_elsewhere_are_for_the_first_stage(self, say, recipe, first, tmp_path):
        words = ["--init-from", first, "--model.optimizer.lr", "0"]
        code, _, err = say("fit", recipe, *self.SMALL, *words, "--out", tmp_path / "run")
        assert code == 0, err
        assert result_of(tmp_path / "run/.stages/1-features")["config"]["run"]["init_from"] == {"network": str(first)}
        last = result_of(tmp_path / "run")["config"]["run"]["init_from"]
        assert last == {"network": str(tmp_path / "run/.stages/1-features")}

    @pytest.mark.slow
    def test_a_finished_run_is_kept_and_overwritten_only_when_told(self, say, recipe, tmp_path):
        words = ["compare", recipe, *self.SMALL, "--seeds", "1", "--out", tmp_path / "c"]
        assert say(*words)[0] == 0
        written = (tmp_path / "c/batchformer-seed0/result.json").stat().st_mtime_ns
        code, _, err = say(*words, "--resume")
        assert code == 0, err
        assert (tmp_path / "c/batchformer-seed0/result.json").stat().st_mtime_ns == written
        code, _, err = say(*words, "--overwrite")
        assert code == 0, err
        assert (tmp_path / "c/batchformer-seed0/result.json").stat().st_mtime_ns > written

    def test_stages_do_not_count_as_runs_of_their_own(self, say, recipe, tmp_path):
        code, _, err = say("compare", recipe, *self.SMALL, "--seeds", "1", "--out", tmp_path / "c")
        assert code == 0, err
        assert say("report", tmp_path / "c", "--out", tmp_path / "page.html")[0] == 0


class TestWeights:
    def begin(self, say, tmp_path, *words):
        code, _, err = say("fit", "digits-lt", *TINY, *STILL, *words, "--out", tmp_path / "new")
        return code, err, tmp_path / "new"

    def same(self, run, expected, keys):
        found = trained(weights_of(run))
        return all(torch.equal(found[key], expected[key]) for key in keys)

    def test_of_a_run_the_module_too(self, say, first, tmp_path):
        code, err, run = self.begin(say, tmp_path, "--init-from", first)
        assert code == 0, err
        expected = trained(weights_of(first))
        assert any("batchformer" in key for key in expected)
        assert self.same(run, expected, expected)

    def test_of_a_run_for_a_baseline_without_the_module(self, say, first, tmp_path):
        code, err, run = self.begin(say, tmp_path, "--init-from", first, "--method", "baseline")
        assert code == 0, err
        expected = trained(weights_of(first))
        assert self.same(run, expected, [key for key in expected if "batchformer" not in key])

    @pytest.mark.parametrize("kind", ["safetensors", "state dict", "of DDP", "of Lightning", "folder"])
    def test_of_a_file_in_any_usual_form(self, say, first, kind, tmp_path):
        plain = tmp_path / "model.safetensors"
        assert say("export", first, "--out", plain)[0] == 0
        weights, source = load_file(plain), plain
        if kind == "folder":
            (tmp_path / "config.json").write_text("{}")
            source = tmp_path
        elif kind != "safetensors":
            source = tmp_path / "weights.pth"
            forms = {
                "state dict": weights,
                "of DDP": {f"module.{key}": value for key, value in weights.items()},
                "of Lightning": {"state_dict": {f"net.{key}": value for key, value in weights.items()}},
            }
            torch.save(forms[kind], source)
        code, err, run = self.begin(say, tmp_path / "to", "--init-from", source)
        assert code == 0, err
        expected = trained({f"net.{key}": value for key, value in weights.items()})
        assert self.same(run, expected, expected)

    def test_of_one_part_alone(self, say, first, tmp_path):
        code, err, run = self.begin(say, tmp_path, "--init-from", f"conv1={first}")
        assert code == 0, err
        expected, found = weights_of(first), weights_of(run)
        assert torch.equal(found["net.conv1.weight"], expected["net.conv1.weight"])
        assert not torch.equal(found["net.fc.weight"], expected["net.fc.weight"])

    def test_a_classifier_of_other_classes_begins_anew(self, say, first, tmp_path):
        plain = tmp_path / "model.safetensors"
        assert say("export", first, "--out", plain)[0] == 0
        weights = load_file(plain)
        weights["fc.weight"], weights["fc.bias"] = torch.zeros(3, weights["fc.weight"].shape[1]), torch.zeros(3)
        torch.save(weights, tmp_path / "three.pth")
        with pytest.warns(UserWarning, match="the classifier is of other classes"):
            code, err, run = self.begin(say, tmp_path, "--init-from", tmp_path / "three.pth")
        assert code == 0, err
        assert torch.equal(weights_of(run)["net.conv1.weight"], weights["conv1.weight"])
        assert weights_of(run)["net.fc.weight"].abs().sum() > 0

    @pytest.mark.parametrize(
        ("source", "told"),
        [
            ("nowhere.pth", "there is no file"),
            ("nothing=FIRST", "the network has no part nothing"),
            ("EMPTY", "holds no weights"),
            ("CODE", "is no file of weights that torch can read"),
            ("OTHER", "does not fit the network"),
        ],
    )
    def test_what_does_not_fit_is_refused_before_anything_is_written(self, say, first, source, told, tmp_path):
        (tmp_path / "empty").mkdir()
        torch.save({"conv1.weight": torch.zeros(1)}, tmp_path / "other.pth")
        torch.save({"model": Evil(tmp_path / "ran")}, tmp_path / "code.pth")
        given = source.replace("FIRST", str(first)).replace("EMPTY", str(tmp_path / "empty"))
        given = given.replace("CODE", str(tmp_path / "code.pth")).replace("OTHER", str(tmp_path / "other.pth"))
        code, err, run = self.begin(say, tmp_path, "--init-from", given)
        assert code == 2
        assert told in err
        assert not run.exists()
        assert not (tmp_path / "ran").exists()


class Evil:
    """Its pickle writes a file when it is loaded as pickles are."""

    def __init__(self, file):
        self.file = str(file)

    def __reduce__(self):
        return open, (self.file, "w")
