"""Generalized zero-shot learning: what each step trains, what unseen classes reach, what is reported and resumed."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from batchformer.cli import main
from batchformer.data import AttributeFiles
from batchformer.data.sets import write_miniature
from batchformer.errors import UserError
from batchformer.losses import supervised_contrast
from batchformer.tasks import GeneralizedZeroShot
from batchformer.tasks.zero_shot.generalized_classifier import fit_softmax
from batchformer.tasks.zero_shot.generalized_options import SoftmaxOptions

from .conftest import make_trainer
from .whole_step import whole_step

SMALL = {
    "generator": {"width": 8, "critic_width": 8, "critic_steps": 2},
    "contrast": {"embedding_dim": 8, "projection_dim": 4, "comparator_width": 4},
    "softmax": {"synthetic": 4, "epochs": 2},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_miniature("features", tmp_path_factory.mktemp("features") / "data")


def data_in(root, **options):
    data = AttributeFiles(str(root), batch_size=16, **options)
    data.setup()
    return data


def built(root, **options):
    changed = {
        key: {**SMALL.get(key, {}), **value} if isinstance(value, dict) else value for key, value in options.items()
    }
    task = GeneralizedZeroShot(**{**SMALL, **changed})
    task.construct(data_in(root))
    return task.train()


def batch_of(root):
    return next(iter(data_in(root).train_dataloader()))


def trained(root, epochs=2, data=None, **options):
    task = GeneralizedZeroShot(**{**SMALL, **options})
    data = data or data_in(root)
    task.construct(data)
    make_trainer(max_epochs=epochs, check_val_every_n_epoch=epochs).fit(task, datamodule=data)
    return task


def seeded(function, *args):
    torch.manual_seed(5)
    return function(*args)


def test_the_critics_loss_is_the_sum_of_its_parts_and_both_streams_are_contrasted(root):
    task, batch = built(root), batch_of(root)
    found = seeded(task.critic_losses, batch)
    torch.testing.assert_close(
        found["loss"], 10 * found["penalty"] - found["distance"] + found["instance"] + found["class"]
    )
    torch.manual_seed(5)
    real, labels = task.net.scaled(batch["features"]), batch["labels"]
    fake = task.generator(task.attributes[labels])
    torch.rand(len(labels), 1)  # of the penalty
    embedded = task.net.embedding(real)
    rows, twice = torch.cat([embedded, task.module.relate(embedded)]), labels.repeat(2)
    projected = F.normalize(task.projection(rows), dim=1)
    torch.testing.assert_close(found["instance"], supervised_contrast(projected, twice, 0.1))
    scores = task.comparator(rows, task.attributes[task.seen]) / 0.1
    position = torch.tensor([int(task.seen[:label].sum()) for label in twice])
    torch.testing.assert_close(found["class"], F.cross_entropy(scores, position))
    scored = [task.critic(each, task.attributes[labels]).mean() for each in (real, fake)]
    torch.testing.assert_close(found["distance"], scored[0] - scored[1])  # of single rows, without the module


@pytest.mark.parametrize("algorithm", ["ce_gzsl", "f_clswgan"])
def test_the_generators_loss_is_the_critics_score_and_its_weighted_parts(root, algorithm):
    options = {"instance_weight": 0.3, "class_weight": 0.7}
    task = built(
        root, algorithm=algorithm, method="baseline", contrast=options, generator={"classification_weight": 0.2}
    )
    batch = batch_of(root)
    found = seeded(task.generator_losses, batch)
    attributes = task.attributes[batch["labels"]]
    score = task.critic(seeded(task.generator, attributes), attributes).mean()
    if algorithm == "f_clswgan":
        expected = -score + 0.2 * found["guided"]
    else:
        expected = -score + 0.3 * found["instance_generated"] + 0.7 * found["class_generated"]
    torch.testing.assert_close(found["generator"], expected)


@pytest.mark.parametrize("rows", ["real", "both"])
def test_generated_rows_are_contrasted_with_real_ones_and_related_by_option_only(root, rows):
    task, batch = built(root, batchformer={"rows": rows, "dropout": 0.0}), batch_of(root)
    found, labels = seeded(task.generator_losses, batch), batch["labels"]
    embedded, of_fake = task.net.embedding(seeded(task.generator, task.attributes[labels])), labels
    if rows == "both":
        embedded, of_fake = torch.cat([embedded, task.module.relate(embedded)]), labels.repeat(2)
    real = task.net.embedding(task.net.scaled(batch["features"]))
    projected = F.normalize(task.projection(torch.cat([embedded, real])), dim=1)
    instance = supervised_contrast(projected, torch.cat([of_fake, labels]), 0.1)
    torch.testing.assert_close(found["instance_generated"], instance)
    position = task.seen.cumsum(0)[of_fake] - 1
    scores = task.comparator(embedded, task.attributes[task.seen]) / 0.1
    torch.testing.assert_close(found["class_generated"], F.cross_entropy(scores, position))


def test_the_generators_step_changes_the_generator_alone_and_the_critics_all_others(root):
    task, batch = built(root), batch_of(root)
    task._trainer = None
    critic, generator = (torch.optim.Adam(p, 0.01) for p in (
        [p for name, p in task.named_parameters() if not name.startswith(("generator", "net.classifier"))],
        task.generator.parameters(),
    ))  # fmt: skip
    task.optimizers = lambda use_pl_optimizer: [critic, generator]
    before = {name: p.clone() for name, p in task.named_parameters()}
    changed = lambda: {name.split(".")[0] for name, p in task.named_parameters() if not torch.equal(p, before[name])}  # noqa: E731
    task._train_generator(batch)
    assert changed() == {"generator"}
    assert all(p.grad is None for name, p in task.named_parameters() if not name.startswith("generator"))
    before = {name: p.clone() for name, p in task.named_parameters()}
    task._train_critic(batch)
    assert changed() == {"critic", "projection", "comparator", "net", "module"}


def test_every_parameter_is_optimised_but_the_classifier_which_is_trained_when_evaluated(root):
    task = built(root, optimizer={"lr": 0.1, "module_lr_factor": 0.5})

    class Trainer:
        precision = "32-true"

    task._trainer = Trainer()
    optimizers = task.configure_optimizers()
    rates = {
        id(p): group.get("lr_factor", 1.0)
        for each in optimizers
        for group in each.param_groups
        for p in group["params"]
    }
    left = {name for name, p in task.named_parameters() if id(p) not in rates}
    assert left == {"net.classifier.weight", "net.classifier.bias"}
    assert {rates[id(p)] for p in task.module.parameters()} == {0.5}
    assert [len(each.param_groups) for each in optimizers] == [2, 1]


def test_the_comparators_gradient_is_that_of_the_epoch_by_option_only(root):
    task = built(root, method="baseline", contrast={"accumulate_comparator": True})
    batch, seen = batch_of(root), []
    optimizer = torch.optim.SGD(task.critic.parameters(), 0.0)  # nothing moves: every step has the same gradient
    task.optimizers = lambda use_pl_optimizer: [optimizer, None]
    for _ in range(3):
        torch.manual_seed(5)
        task.comparator.zero_grad()
        task._train_critic(batch)
        seen.append(task.comparator.hidden.weight.grad.clone())
    torch.testing.assert_close(seen[1], 2 * seen[0])
    torch.testing.assert_close(seen[2], 3 * seen[0])
    assert "accumulated_0" in task.state_dict()  # a checkpoint inside an epoch keeps it
    assert "accumulated_0" not in built(root).state_dict()


def test_the_comparators_gradient_begins_anew_in_every_epoch(root, monkeypatch):
    step, before = GeneralizedZeroShot._train_critic, []

    def noted(task, batch):
        before.append(bool(task._accumulated()[0].any()))
        return step(task, batch)

    monkeypatch.setattr(GeneralizedZeroShot, "_train_critic", noted)
    trained(root, contrast={**SMALL["contrast"], "accumulate_comparator": True})
    assert before == [False, True, True, True, True, True] * 2


def test_the_learning_rate_falls_after_every_so_many_epochs(root):
    task = built(root, optimizer={"lr": 0.8, "decay": 0.5, "decay_epochs": 100})

    class Trainer:
        current_epoch = 0

    task._trainer, rates = Trainer(), []
    for Trainer.current_epoch in (0, 99, 100, 250):
        rates.append(task.learning_rate())
    assert rates == [0.8, 0.8, 0.4, 0.2]


def test_batches_of_the_critic_are_drawn_anew_and_an_epoch_is_enough_for_the_generator(root):
    data = data_in(root)
    order = built(root).sampler(data)
    slots = order(3).reshape(-1, 16)
    assert len(slots) == 2 * 3  # critic steps x batches that cover 48 samples
    assert all(len({*batch.tolist()}) == 16 for batch in slots)
    assert len({*order(3).tolist()}) > 32
    assert np.array_equal(order(3), slots.reshape(-1))
    assert not np.array_equal(order(4), order(3))
    large = AttributeFiles(str(root), batch_size=100)
    large.setup()
    counts = np.bincount(built(root).sampler(large)(0)[:100], minlength=48)
    assert counts.min() == 2  # more than there are: each twice before one comes a third time
    for algorithm in ("f_clswgan", "linear"):  # the reference of a comparison trains on a small set, too
        trained(root, epochs=1, data=large, algorithm=algorithm, method="baseline")


def weights(task):
    return {name: value for name, value in task.state_dict().items() if not name.startswith("net.classifier")}


@pytest.mark.parametrize("algorithm", ["ce_gzsl", "f_clswgan"])
def test_unseen_classes_reach_the_final_classifier_alone(root, tmp_path, algorithm):
    """Other features and other attributes of unseen classes: the same training to the last bit."""
    content = dict(np.load(root / "features.npz"))
    content["features"] = content["features"].copy()
    content["features"][content["test_unseen_loc"]] += 3
    content["att"] = content["att"].copy()
    content["att"][8:] = 0.5
    np.savez(tmp_path / "features.npz", **content)
    method = "batchformer" if algorithm == "ce_gzsl" else "baseline"
    tasks = [trained(place, algorithm=algorithm, method=method) for place in (root, tmp_path)]
    first, second = (weights(task) for task in tasks)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(*(task.net.classifier.weight for task in tasks))


def test_results_are_means_over_classes_and_the_last_epoch_counts(root):
    task = built(root, oracle=True)
    classes, labels = 11, torch.tensor([0, 0, 0, 1, 8, 8, 9, 10])

    class Trainer:
        sanity_checking, current_epoch = False, 4

        class state:
            fn = "fit"

    task._trainer = Trainer()

    def say(metric, predicted):
        metric.update(F.one_hot(torch.tensor(predicted), classes).float(), labels)

    say(task.accuracy, [0, 0, 1, 1, 8, 0, 9, 0])
    say(task.among_unseen, [0, 0, 0, 0, 8, 9, 9, 8])
    say(task.accuracies[0], [0, 0, 0, 1, 8, 8, 9, 10])
    say(task.accuracies[1], [0, 0, 1, 1, 8, 0, 9, 0])
    found = task.results("val")
    seen, unseen = 100 * (2 / 3 + 1) / 2, 100 * (1 / 2 + 1 + 0) / 3
    assert found["seen"] == pytest.approx(seen)
    assert found["unseen"] == found["zero_shot"] == pytest.approx(unseen)
    assert found["harmonic"] == pytest.approx(2 * seen * unseen / (seen + unseen))
    assert found["harmonic_oracle"] == found["seen_oracle"] == 100  # an epoch of the classifier that is not the last
    say(task.accuracy, [5] * 8)
    again = task.results("val")
    assert (again["harmonic"], again["harmonic_oracle"]) == (0, 100)
    assert [measure.key for measure in task.measures][:3] == ["unseen", "seen", "harmonic"]  # the paper's order
    assert [measure.key for measure in task.measures if measure.primary] == ["harmonic"]


def test_unseen_alone_is_judged_without_the_seen_classes(root):
    task = built(root).eval()
    with torch.no_grad():
        task.net.classifier.weight.zero_()
        task.net.classifier.bias.copy_(torch.tensor([5.0] * 8 + [0.0, 1.0, 0.0]))
        task.evaluate({"features": torch.rand(3, 16), "labels": torch.tensor([8, 9, 9])}, "val")
    for metric, right in ((task.accuracy, 0), (task.among_unseen, 100)):
        metric.sync()
        assert metric.per_class()[8:10].tolist() == [0, right]


def test_the_final_classifier_learns_from_real_and_generated_rows():
    torch.manual_seed(0)
    centres = torch.eye(3) * 4
    labels = torch.arange(3).repeat(20)
    rows = centres[labels] + 0.1 * torch.randn(60, 3)
    layer = torch.nn.Linear(3, 3)
    kept = seeded(fit_softmax, layer, rows, labels, SoftmaxOptions(epochs=30, batch_size=7, lr=0.05), True)
    assert (layer(rows).argmax(1) == labels).all()
    assert len(kept) == 30
    assert torch.equal(kept[-1][0], layer.weight)
    first = layer.weight.clone()
    seeded(fit_softmax, layer, rows, labels, SoftmaxOptions(epochs=30, batch_size=7, lr=0.05))
    assert torch.equal(layer.weight, first)  # from new initial weights, by the seed
    seeded(fit_softmax, layer, rows, labels, SoftmaxOptions(epochs=30, synthetic=7, lr=0.05))
    assert torch.equal(layer.weight, first)  # batches as large as a class of generated rows


def fitted(out, *more):
    words = ["fit", "digits-gzsl", "--trainer.accelerator", "cpu", "--out", str(out), "--no-analysis", *more]
    assert main(words) == 0
    return json.loads((out / "result.json").read_text())


@pytest.mark.slow
def test_generated_features_of_numbers_never_seen_are_of_use(tmp_path):
    found = fitted(tmp_path / "run", "--trainer.max_epochs", "12", "--trainer.check_val_every_n_epoch", "12")
    assert found["metrics"]["seen"] > 50  # of 100 classes
    assert found["metrics"]["zero_shot"] > 40  # of 20


def test_the_page_shows_real_beside_generated_features_and_the_run_is_tested_and_exported_as_it_is(tmp_path, capsys):
    out = tmp_path / "run"
    short = [
        "--trainer.max_epochs",
        "2",
        "--trainer.check_val_every_n_epoch",
        "1",
        "--trainer.limit_train_batches",
        "3",
    ]
    result = fitted(out, *short, "--model.generator.critic_steps", "2", "--model.softmax.epochs", "2")
    assert result["variant"] == "ce-gzsl+batchformer"
    assert result["metrics"]["harmonic_oracle"] >= result["metrics"]["harmonic"]
    curve, plane = result["sections"]
    assert curve["series"]["x"] == [1, 2]
    for key, line in (("harmonic", "harmonic mean"), ("unseen", "unseen"), ("seen", "seen")):
        assert curve["series"]["lines"][line][-1] == pytest.approx(result["metrics"][key], abs=1e-4)
    kinds = [name.rpartition(", ")[2] for name in plane["points"]["groups"]]
    assert kinds == ["real", "generated"] * 3
    assert main(["report", str(out), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    section = page.partition("Real and generated features of unseen classes</h3>")[2].partition("</figure>")[0]
    assert section.count("<circle") >= 6 * 10
    assert "<polyline" not in section
    capsys.readouterr()
    assert main(["test", str(out)]) == 0
    assert "exactly these numbers" in capsys.readouterr().out  # the classifier of the run, not another one
    assert main(["export", str(out)]) == 0
    capsys.readouterr()


def test_the_exported_network_takes_features_as_they_are_read(root):
    task = trained(root, epochs=1, algorithm="f_clswgan", method="baseline")
    data, plain = data_in(root), task.plain_network()
    plain.load_state_dict(task.trained_network().state_dict())
    features = torch.from_numpy(data._splits["val"].images)
    wanted = task.net.classifier((features - task.net.low) / task.net.extent)
    torch.testing.assert_close(plain(features), wanted)
    low, high = (torch.from_numpy(f(data._splits["train"].images, 0)) for f in (np.min, np.max))
    torch.testing.assert_close(task.net.scaled(low), torch.zeros(16))
    torch.testing.assert_close(task.net.scaled(high), torch.ones(16))


class Operations(TorchDispatchMode):
    """The names of all operations, those of the backward pass too."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("algorithm", ["ce_gzsl", "f_clswgan"])
def test_losses_and_their_gradients_read_nothing_back_from_the_device(root, algorithm):
    """So that a CUDA graph can capture a step: no operation whose result or size the host has to know."""
    task = built(root, algorithm=algorithm, method="batchformer" if algorithm == "ce_gzsl" else "baseline")
    batch = batch_of(root)
    with Operations() as seen:
        task.critic_losses(batch)["loss"].backward()
        torch.autograd.grad(task.generator_losses(batch)["generator"], list(task.generator.parameters()))
    assert "aten::mm" in seen.names or "aten::addmm" in seen.names
    reading = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::item", "aten::_unique2"}
    assert not reading & seen.names


def test_the_step_that_is_captured_ends_with_the_bits_of_the_ordinary_one(root):
    ends = []
    for kind in (GeneralizedZeroShot, whole_step(GeneralizedZeroShot)):
        rate = {"lr": 2.0**-13}  # of a captured step it is a float32
        task, data = kind(**SMALL, optimizer=rate), data_in(root)
        task.construct(data)
        trainer = make_trainer(max_epochs=2)
        trainer.fit(task, datamodule=data)
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        ends.append((task.state_dict(), trainer.global_step, metrics))
    (ordinary, *told), (whole, *whole_told) = ends
    assert whole_told == told
    assert all(torch.equal(whole[name], value) for name, value in ordinary.items())


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    "options",
    [{}, {"method": "baseline"}, {"batchformer": {"rows": "both"}}, {"algorithm": "f_clswgan", "method": "baseline"},
     {"contrast": {**SMALL["contrast"], "accumulate_comparator": True}}],
    ids=["batchformer", "baseline", "both", "f_clswgan", "accumulated"],
)  # fmt: skip
def test_captured_steps_train_what_uncaptured_ones_train(root, options, precision):
    ends = []
    for cuda_graph in (False, True):
        task, data = GeneralizedZeroShot(**{**SMALL, **options}, cuda_graph=cuda_graph), data_in(root)
        task.construct(data)
        trainer = make_trainer(accelerator="cuda", devices=1, max_epochs=4, precision=precision)
        trainer.fit(task, datamodule=data)
        ends.append({name: value.float().cpu() for name, value in weights(task).items()})
        assert trainer.global_step == 24
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"algorithm": "tf_vaegan"}, "must be ce_gzsl, f_clswgan or linear"),
        ({"algorithm": "linear"}, "linear has no embedding that BatchFormer could relate"),
        ({"method": "both"}, "must be \"batchformer\" or \"baseline\""),
        ({"batchformer": {"rows": "fake"}}, 'must be "real" or "both"'),
        ({"generator": {"critic_steps": 0}}, "critic_steps=0 must be 1 or more"),
        ({"contrast": {"class_temperature": 0.0}}, "class_temperature=0.0 must be"),
        ({"softmax": {"synthetic": 0}}, "synthetic=0 must be 1 or more"),
        ({"linear": {"ridge": 0.0}}, "ridge=0.0 must be"),
        ({"optimizer": {"lr": -1.0}}, "lr=-1.0 must not be negative"),
        ({"optimizer": {"betas": [0.5, 1.0]}}, "betas"),
    ],
)  # fmt: skip
def test_options_that_cannot_work_are_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        GeneralizedZeroShot(**options)


def test_data_and_trainers_that_cannot_work_are_refused(root):
    task = built(root)
    with pytest.raises(UserError, match="needs features with attributes"):
        GeneralizedZeroShot(**SMALL).construct({"classes": ["a", "b"], "class_counts": [1, 1]})
    info = data_in(root).info
    info["feature_dim"] = 7
    with pytest.raises(UserError, match="trained on features of 16 numbers, the data have 7"):
        task.construct(info)

    class Trainer:
        precision = "16-mixed"

    task._trainer = Trainer()
    with pytest.raises(UserError, match="bf16-mixed"):
        task.check_trainer()


def test_the_linear_map_needs_no_steps_and_is_the_closed_form(root):
    task = trained(root, epochs=1, algorithm="linear", method="baseline", linear={"ridge": 0.5, "attribute_ridge": 0.1})
    data = data_in(root)
    features = task.net.scaled(torch.from_numpy(data._splits["train"].images)).double()
    labels, s = torch.from_numpy(data._splits["train"].labels), task.attributes.double()
    y = 2.0 * F.one_hot(labels, 11)[:, task.seen].double() - 1
    v = torch.linalg.inv(features.T @ features + 0.5 * torch.eye(16)) @ features.T @ y @ s[task.seen]
    v = v @ torch.linalg.inv(s[task.seen].T @ s[task.seen] + 0.1 * torch.eye(6))
    torch.testing.assert_close(task.net.classifier.weight.double(), s @ v.T, rtol=1e-4, atol=1e-5)
    assert task.trainer.global_step > 0
