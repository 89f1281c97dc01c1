"""runs.fit, runs.compare and runs.load do what the commands do, and show their results."""

import json
from pathlib import Path

import pytest
import torch

from batchformer import runs
from batchformer.cli import main
from batchformer.errors import UserError

NOTEBOOK = Path(__file__).parents[2] / "examples/from_python.ipynb"
TINY = {"trainer.limit_train_batches": 2, "data": {"batch_size": 16}, "model.backbone_args": {"widths": [4, 4]}}
WORDS = ["--trainer.limit_train_batches", "2", "--data.batch_size", "16", "--model.backbone_args", '{"widths": [4, 4]}']


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("python")


@pytest.fixture(scope="module")
def run(place):
    return runs.fit("digits-lt", TINY, seed=1, epochs=1, out=place / "run", no_analysis=True)


@pytest.fixture(scope="module")
def both(place):
    variants = {"plain": {"model.method": "baseline"}, "<b>": {"model.batchformer.heads": 2}}
    with pytest.raises(UserError, match="cannot name a run"):
        runs.compare("digits-lt", TINY, seeds=1, variants=variants, epochs=1, out=place / "both")
    variants["two heads"] = variants.pop("<b>")
    return runs.compare(
        "digits-lt", TINY, seeds=[1, 2], variants=variants, epochs=1, out=place / "both", no_analysis=True
    )


def test_a_run_is_that_of_the_command(run, place):
    words = [*WORDS, "--seed", "1", "--epochs", "1", "--no-analysis", "--out", str(place / "command")]
    assert main(["fit", "digits-lt", *words]) == 0
    trained = [torch.load(place / name / "checkpoints/last.ckpt", weights_only=True) for name in ("run", "command")]
    weights = [each["state_dict"] for each in trained]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert run.result["config"]["model"]["backbone_args"] == {"widths": [4, 4]}
    assert run.metrics == json.loads((place / "command/result.json").read_text())["metrics"]
    assert run.history[-1]["accuracy"] == run.metrics["accuracy"]


def test_a_run_shows_itself(run):
    shown = f"{run.metrics['accuracy']:.2f} %"
    assert shown in repr(run)
    assert f"<td>{shown}</td>" in run._repr_html_()
    assert "digits-lt, batchformer, seed 1" in run._repr_html_()


def test_a_run_gives_its_network_and_exports_it(run, place):
    network = run.network()
    assert not [name for name, _ in network.named_parameters() if "batchformer" in name]
    assert run.export(place / "model.safetensors", half=True) == place / "model.safetensors"
    with pytest.raises(UserError, match="must be one of safetensors, onnx, pt2, folder"):
        run.export(format="tflite")


def test_a_comparison_shows_its_table_and_verdict(both, place):
    assert [(each.result["variant"], each.result["seed"]) for each in both] == [
        ("plain", 1), ("plain", 2), ("two heads", 1), ("two heads", 2)
    ]  # fmt: skip
    assert both.verdict in repr(both)
    assert '<th scope="col">two heads</th>' in both._repr_html_()
    assert json.loads((place / "both/compare.json").read_text())["verdict"] == both.verdict
    assert both.runs[2].result["config"]["model"]["batchformer"]["heads"] == 2


def test_load_reads_what_is_finished(run, both, place):
    assert runs.load(run.folder).metrics == run.metrics
    assert repr(runs.load(place / "both")) == repr(both)
    with pytest.raises(UserError, match="no run folder"):
        runs.load(place / "nothing")


@pytest.mark.parametrize(
    ("recipe", "fields", "options", "expected"),
    [
        ("digits-tl", {}, {}, "Did you mean digits-lt?"),
        ("digits-lt", {"trainer.max_epoch": 3}, {}, r"Did you mean trainer\.max_epochs\?"),
        ("digits-lt", {"trainer": {"max_epochs": "many"}}, {}, "expected a whole number"),
        ("digits-lt", {}, {"sed": 3}, "Did you mean --seed?"),
        ("digits-lt", {}, {"out": "run"}, "already exists"),
    ],
)
def test_mistakes_are_errors_of_one_sentence(run, recipe, fields, options, expected, place, monkeypatch):
    monkeypatch.chdir(place)
    with pytest.raises(UserError, match=expected) as caught:
        runs.fit(recipe, fields, **{"out": "new", **options})
    assert "\n" not in str(caught.value)


def test_unknown_names_of_the_room_are_refused():
    assert {"fit", "compare", "load"} <= set(dir(runs))
    with pytest.raises(AttributeError, match="has no attribute 'fitt'"):
        runs.fitt  # noqa: B018


def cells():
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_was_executed_from_top_to_bottom():
    assert [cell["execution_count"] for cell in cells()] == list(range(1, len(cells()) + 1))
    outputs = [output for cell in cells() for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert sum("text/html" in output.get("data", {}) for output in outputs) == 2


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for cell in cells():
        exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), names)
    assert names["both"].runs
    assert (tmp_path / "digits/model.pt2").is_file()
