"""Compositional zero-shot recognition: rows of both streams, rates, fixed features, worlds, selection, the page."""

import json
import math

import lightning as L
import pytest
import torch
import torch.nn.functional as F

from batchformer.cli import main
from batchformer.data import DataInfo, DigitsStates, PairFolders
from batchformer.data.sets import write_miniature
from batchformer.errors import UserError
from batchformer.metrics.compositional import MEASURES
from batchformer.report import write_report
from batchformer.tasks import CompositionalZeroShot
from batchformer.tasks.zero_shot import fixed_features as features_module

PAIRS = [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]]
INFO = DataInfo(
    classes=[f"{a} {o}" for a in "abc" for o in "xy"],
    class_counts=[4, 4, 4, 0, 0, 4],
    attributes=list("abc"),
    objects=list("xy"),
    pairs=PAIRS,
    seen=[True, True, True, False, False, True],
    evaluated={"test": [0, 1, 2, 3, 5], "val": [0, 1, 2, 4, 5]},
    evaluation_sets=["test", "val"],
    word_vectors=torch.randn(5, 6, generator=torch.Generator().manual_seed(0)),
)
SMALL = {"backbone": "resnet20", "backbone_args": {"widths": [8, 8]}}
METHODS = ("cge", "compcos", "visual_product", "label_embedding")


def built(info=INFO, **options):
    pairs = {"graph_dims": [8], **options.pop("pairs", {})}
    task = CompositionalZeroShot(**{**SMALL, "pairs": pairs, **options})
    task.construct(info)
    return task.train()


def batch(labels=(0, 1, 2, 5)):
    labels = torch.tensor(labels)
    images = torch.randn(len(labels), 3, 8, 8, generator=torch.Generator().manual_seed(4))
    pairs = torch.tensor(PAIRS)[labels]
    return {"images": images, "labels": labels, "attributes": pairs[:, 0], "objects": pairs[:, 1]}


@pytest.mark.parametrize("name", METHODS)
def test_the_loss_is_the_mean_over_plain_and_related_rows(name):
    task, data = built(pairs={"name": name, "dropout": 0.0}), batch()
    torch.manual_seed(5)
    losses = task.step(data)
    torch.manual_seed(5)
    outputs = task(data["images"])
    twice = {key: data[key].repeat(2) for key in ("labels", "attributes", "objects")}
    if name == "visual_product":
        wanted = F.cross_entropy(outputs[0], twice["attributes"]) + F.cross_entropy(outputs[1], twice["objects"])
        torch.testing.assert_close(losses["loss"], wanted)
    elif name != "label_embedding":  # which draws its negatives
        place = torch.tensor([0, 1, 2, -1, -1, 3])[twice["labels"]]
        torch.testing.assert_close(losses["loss"], F.cross_entropy(outputs, place))
    losses["loss"].backward()
    missing = [key for key, value in task.net.named_parameters() if value.grad is None]
    assert missing == []


def test_the_loss_of_a_sample_reaches_the_features_of_others_through_the_module_alone():
    for method, reaches in (("batchformer", True), ("baseline", False)):
        task = built(method=method, pairs={"name": "compcos"}, batchformer={"dropout": 0.0})
        features = torch.randn(4, 8, requires_grad=True)
        outputs = task(features)
        outputs[-4 if method == "batchformer" else 0].sum().backward()
        assert bool(features.grad[1:].any()) == reaches
        assert bool(features.grad[0].any())


def rates(task):
    class Trainer:
        precision = "32-true"

    task._trainer = Trainer()
    optimizer = task.configure_optimizers()
    return {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}


@pytest.mark.parametrize("features", ["trained", "fixed"])
def test_scorer_backbone_and_module_have_their_learning_rates(features):
    options = {"lr": 0.1, "backbone_lr_factor": 0.01, "module_lr_factor": 0.5}
    task = built(optimizer=options, features=features)
    found = rates(task)
    assert {found[id(p)] for p in task.attachment.parameters()} == {0.05}
    assert {found[id(p)] for p in task.net.scorer.parameters()} == {0.1}
    backbone = list(task.net.backbone.parameters())
    assert {found.get(id(p)) for p in backbone} == ({0.001} if features == "trained" else {None})
    assert all(p.requires_grad == (features == "trained") for p in backbone)
    assert all(layer.training == (features == "trained") for layer in task.net.backbone.modules())
    assert task.attachment.points[0].module.training


def test_only_pairs_of_training_and_of_the_set_are_candidates_in_the_closed_world():
    task = built(pairs={"name": "compcos"})
    candidates = {name: task.metrics[name][0].candidates.nonzero()[:, 0].tolist() for name in ("test", "val")}
    assert candidates == INFO.evaluated
    opened = built(pairs={"name": "compcos", "world": "open"})
    assert opened.metrics["test"][0].candidates.all()
    assert opened.net.scorer.pairs.tolist() == [[a, o] for a in range(3) for o in range(2)]
    assert opened.net.scorer.seen.tolist() == INFO.seen
    fewer = DataInfo({**INFO, "pairs": PAIRS[:5], "seen": [True, True, True, False, True], "classes": list("vwxyz"),
                      "class_counts": [1, 1, 1, 0, 1], "evaluated": {"test": [0, 3], "val": [1, 4]}})  # fmt: skip
    wider = built(fewer, pairs={"name": "compcos", "world": "open"})
    assert wider(batch()["images"]).shape[1] == 6
    assert wider.candidate_of.tolist() == [0, 1, 2, 3, 4]


def test_the_best_threshold_of_feasibility_on_validation_is_taken_for_the_test():
    task = built(method="baseline", pairs={"name": "compcos", "world": "open", "feasibility_threshold": "val"}).eval()
    task.trainer = L.Trainer(logger=False, enable_progress_bar=False, accelerator="cpu")
    task.on_validation_start()
    limits = [metric.candidates.sum().item() for metric in task.metrics["val"]]
    assert limits[0] == 6
    assert limits[-1] < 6
    assert sorted(limits, reverse=True) == limits
    assert all(metric.candidates[task.net.scorer.seen].all() for metric in task.metrics["val"])
    for name in ("test", "val"):
        task.evaluate(batch((0, 1, 2, 3, 4, 5)), name)
    areas = [metric.compute().measures()["auc"] for metric in task.metrics["val"]]
    wanted = [metric.compute().measures()["auc"] for metric in task.metrics["test"]]
    assert task.results("val")["auc"] == max(areas)
    assert task.results("test")["auc"] == wanted[areas.index(max(areas))]


@pytest.mark.parametrize("world", ["closed", "open"])
def test_predictions_have_the_bias_of_validation_on_unseen_pairs(world):
    task, seen = built(pairs={"name": "compcos", "world": world}).eval(), torch.tensor(INFO.seen)
    for bias in (-50.0, 50.0):  # cosines are scaled by 20
        task.bias.fill_(bias)
        said = task.predict_step(batch(), 0)
        assert said.shape == (4, 6)
        assert (seen[said.argmax(1)] == (bias < 0)).all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pairs": {"name": "clip"}}, r"pairs\.name='clip'"),
        ({"pairs": {"world": "other"}}, r"pairs\.world='other'"),
        ({"pairs": {"dropout": 1.0}}, r"pairs\.dropout"),
        ({"pairs": {"graph_dims": [0]}}, r"pairs\.graph_dims"),
        ({"pairs": {"scale": 0.0}}, r"pairs\.scale"),
        ({"pairs": {"name": "compcos", "feasibility_threshold": 0.1}}, "open world"),
        ({"optimizer": {"lr": -1.0}}, r"optimizer\.lr"),
        ({"optimizer": {"backbone_lr_factor": -1.0}}, r"optimizer\.backbone_lr_factor"),
        ({"optimizer": {"schedule": "poly"}}, r"optimizer\.schedule"),
        ({"features": "frozen"}, "features='frozen'"),
        ({"judge_by": "test"}, "judge_by='test'"),
    ],
)
def test_options_that_cannot_be_are_refused(options, said):
    with pytest.raises(UserError, match=said):
        CompositionalZeroShot(**SMALL, **options)


def test_data_without_pairs_and_methods_without_words_are_refused():
    with pytest.raises(UserError, match="needs data of pairs"):
        built(DataInfo(classes=["a"], class_counts=[1]))
    with pytest.raises(UserError, match=r"needs word vectors.*--data\.words"):
        built(DataInfo({**INFO, "word_vectors": None}))
    built(DataInfo({**INFO, "word_vectors": None}), pairs={"name": "visual_product"})


# whole runs

COMPCOS = ("--model.pairs.name", "compcos", "--method", "batchformer", "--model.optimizer.schedule", "constant")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_miniature("plantvillage-czsl", tmp_path_factory.mktemp("pairs") / "data")


def fit(out, root, *words):
    common = ["--data-root", str(root), "--trainer.accelerator", "cpu", "--model.backbone", "test_resnet",
              "--data.image_size", "32", "--data.batch_size", "8", "--model.pairs.graph_dims", "[8]",
              "--trainer.check_val_every_n_epoch", "1", "--run.checkpoint_every_epochs", "1"]  # fmt: skip
    assert main(["fit", "plantvillage-czsl", *common, *words, "--out", str(out)]) == 0
    return json.loads((out / "result.json").read_text())


@pytest.fixture(scope="module")
def run(root, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    return out, fit(out, root, "--trainer.max_epochs", "4", *COMPCOS)


def test_fixed_features_are_computed_once_for_all_runs_and_are_those_of_the_images(root, monkeypatch):
    monkeypatch.setattr(features_module, "_latest", ("", {}))
    calls = []

    def task_and_data(seed):
        data = PairFolders(str(root), words=["words.npz"], image_size=32, workers=0, batch_size=8, eval_batch_size=5)
        task = CompositionalZeroShot("test_resnet", features="fixed", pairs={"graph_dims": [8]}, seed=seed)
        task.construct(data.info)
        task.net.backbone.load_state_dict(weights)
        task.net.backbone.register_forward_hook(lambda *_: calls.append(1))
        return task, data

    data = PairFolders(str(root), words=["words.npz"], image_size=32, workers=0)
    first = CompositionalZeroShot("test_resnet", features="fixed", pairs={"graph_dims": [8]})
    first.construct(data.info)
    weights = first.net.backbone.state_dict()
    held = []
    for seed in (0, 1):
        task, data = task_and_data(seed)
        trainer = L.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
                            enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
        trainer.fit(task, datamodule=data)
        held.append(data._features)
    assert len(calls) == sum(-(-len(rows) // 5) for rows in held[0].values())
    assert held[0]["train"] is held[1]["train"]
    fresh = PairFolders(str(root), words=["words.npz"], image_size=32, workers=0, eval_batch_size=5)
    batches = list(fresh.evaluation_loader("test"))
    with torch.no_grad():
        wanted = torch.cat([task.net.backbone.eval()(each["images"]) for each in batches])
    assert torch.equal(held[0]["test"], wanted)


def test_torchvisions_mobilenet_is_the_same_network_under_timms_names(tmp_path):
    from torchvision.models import mobilenet_v2

    theirs = mobilenet_v2().eval()
    torch.save(theirs.state_dict(), tmp_path / "mobilenet.pth")
    theirs.classifier = torch.nn.Identity()
    task = CompositionalZeroShot("mobilenetv2_100", features="fixed", method="baseline", pairs={"graph_dims": [8]})
    task.init_from = {"backbone": str(tmp_path / "mobilenet.pth")}
    task.construct(INFO)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(task.net.backbone.eval()(images), theirs(images))


def test_features_that_are_not_finite_are_named(root):
    data = PairFolders(str(root), image_size=32, workers=0, eval_batch_size=4)
    data.setup()

    class Spoiled(torch.nn.Module):
        seen = 0

        def forward(self, images):
            out = images.mean((2, 3))
            self.seen += len(images)
            return out / 0 if self.seen > 8 else out

    with pytest.raises(UserError, match="the features of image 8 of the set train are not finite"):
        features_module.fixed_features(Spoiled(), data, torch.device("cpu"))


def test_results_have_every_measure_and_the_selection_is_on_validation(run):
    _, result = run
    metrics, history = result["metrics"], result["history"]
    assert {*MEASURES, "auc_selected", "hm_selected", "val/auc"} <= metrics.keys()
    best = max(history, key=lambda entry: entry["val/auc"])
    assert metrics["auc_selected"] == pytest.approx(best["auc"])
    assert metrics["object_selected"] == pytest.approx(best["object"])
    assert [measure["key"] for measure in result["measures"] if measure["primary"]] == ["auc"]
    assert metrics["auc"] <= metrics["auc_top2"] <= metrics["auc_top3"]
    assert len(result["per_class"]) == 9


def test_the_page_has_the_curve_of_all_variants_the_grid_and_the_pictures(run, root, tmp_path):
    out, result = run
    titles = [section["title"] for section in result["sections"]]
    assert titles[:3] == ["Seen against unseen pairs", "Accuracy of every pair", "Most frequent confusions"]
    curve, grid, confusions = result["sections"][:3]
    line = next(iter(curve["series"]["lines"].values()))
    assert max(value for value in line if value is not None) <= result["metrics"]["seen"] + 1e-6
    values = grid["grid"]["values"]
    for (attribute, object_), accuracy in zip(
        [(a, o) for a in range(3) for o in range(3)], result["per_class"], strict=True
    ):
        assert values[attribute][object_] == (None if accuracy is None else pytest.approx(accuracy))
    assert grid["grid"]["marked"] == [[0, 1], [2, 2]]
    wrong = sum(int(row[3].split()[0]) for row in confusions["table"]["rows"])
    images = [2, 0, 2, 2, 2, 2, 2, 2, 4]
    right = sum(a * n / 100 for a, n in zip(result["per_class"], images, strict=True) if a is not None)
    assert wrong == sum(images) - round(right)
    other = fit(tmp_path / "other", root, "--trainer.max_epochs", "1", "--method", "baseline")
    assert (tmp_path / "other" / "mistakes" / "mistakes.png").is_file()
    page = write_report([out, tmp_path / "other"], tmp_path / "report.html").read_text()
    first = page.split('<div class="grid first">')[1]
    assert page.count(">Seen against unseen pairs</h") == 1
    assert first.index("<h4>Seen against unseen pairs</h4>") < first.index("<h3>")  # on the first screen
    assert page.count('class="value marked"') == 2
    assert page.count("data:image/png") == 2
    assert other["variant"] == "baseline"


def test_a_finished_run_is_tested_exported_and_predicts_with_its_bias(run, root, tmp_path, capsys):
    out, result = run
    assert main(["test", str(out)]) == 0
    assert "exactly these numbers" in capsys.readouterr().out
    assert main(["export", str(out), "--out", str(tmp_path / "model.safetensors")]) == 0
    image = next((root / "images").glob("*/0.jpg"))
    assert main(["predict", str(out), str(image), "--out", str(tmp_path / "said.csv")]) == 0
    said = (tmp_path / "said.csv").read_text().splitlines()[1].split(",")
    assert said[1] in result["class_names"]
    assert 0 < float(said[2]) <= 1


def test_a_resumed_run_ends_like_one_that_never_stopped(run, root, tmp_path):
    whole_folder, whole = run
    out = tmp_path / "run"
    fit(out, root, "--trainer.max_epochs", "2", *COMPCOS)
    (out / "result.json").unlink()
    config = (out / "config.yaml").read_text()
    (out / "config.yaml").write_text(config.replace("max_epochs: 2", "max_epochs: 4"))
    resumed = fit(out, root, "--trainer.max_epochs", "4", *COMPCOS, "--resume")
    assert resumed["metrics"] == whole["metrics"]
    assert resumed["history"] == whole["history"]
    assert resumed["sections"] == whole["sections"]
    one, other = (torch.load(each / "checkpoints" / "last.ckpt", weights_only=True) for each in (out, whole_folder))
    assert all(torch.equal(value, other["state_dict"][key]) for key, value in one["state_dict"].items())


def test_embedded_digits_learn_unseen_pairs(tmp_path):
    words = ["--trainer.accelerator", "cpu", "--trainer.max_epochs", "3", "--method", "baseline"]
    assert main(["fit", "digits-states", *words, "--out", str(tmp_path / "run")]) == 0
    metrics = json.loads((tmp_path / "run" / "result.json").read_text())["metrics"]
    assert metrics["attribute"] > 60
    assert metrics["auc"] > 3
    assert DigitsStates().info.image_size == 8
    assert not math.isnan(metrics["val/auc"])
