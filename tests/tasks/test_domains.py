"""Domain generalization and adaptation: rows and their domains, what learns at which rate, what is chosen."""

from __future__ import annotations

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from batchformer.analysis.after_training import _plane, evenly_spaced_samples
from batchformer.cli import main
from batchformer.data import DataInfo
from batchformer.errors import UserError
from batchformer.losses import coral_penalty, irm_penalty, vrex_penalty
from batchformer.tasks import DomainAdaptation, DomainGeneralization
from batchformer.tasks.domains.options import AlgorithmOptions

INFO = DataInfo(
    classes=["a", "b", "c"], class_counts=[9, 9, 9], domains=["x", "y", "z"], evaluation_sets=["target", "source"]
)
SMALL = {"backbone": "resnet20", "backbone_args": {"widths": [8, 8]}}


def batch(per_domain=2, domains=3):
    torch.manual_seed(3)
    rows = per_domain * domains
    return {"images": torch.randn(rows, 3, 8, 8), "labels": torch.randint(3, (rows,)),
            "domains": torch.arange(domains).repeat_interleave(per_domain)}  # fmt: skip


def built(kind=DomainGeneralization, info=INFO, **options):
    task = kind(**{**SMALL, **options})
    task.construct(info)
    return task.train()


def seen(task, data):
    """Logits and features of the next step, which draws the same numbers."""
    torch.manual_seed(5)
    found = task.step(data)
    torch.manual_seed(5)
    return found, task(data["images"])


@pytest.mark.parametrize("method", ["baseline", "batchformer"])
def test_penalties_are_of_each_domain_over_the_rows_of_both_streams(method):
    data = batch()
    rows = [[0, 1], [2, 3], [4, 5]] if method == "baseline" else [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    for name in ("irm", "vrex"):
        task = built(method=method, algorithm={"name": name})
        found, logits = seen(task, data)
        labels = data["labels"].repeat(len(logits) // 6)
        if name == "vrex":
            risks = torch.stack([F.cross_entropy(logits[part], labels[part]) for part in rows])
            wanted = vrex_penalty(risks)
        else:
            wanted = irm_penalty(
                torch.stack([logits[part] for part in rows]), torch.stack([labels[part] for part in rows])
            )
        torch.testing.assert_close(found["penalty"], wanted)
        torch.testing.assert_close(found["risk"], F.cross_entropy(logits, labels))
        task.penalty_weight.fill_(2.5)
        again, _ = seen(task, data)
        torch.testing.assert_close(again["loss"], again["risk"] + 2.5 * again["penalty"])


def test_the_released_irm_mixes_domains_by_option():
    data = batch()
    task = built(algorithm={"name": "irm", "mixed_domains": True})
    found, logits = seen(task, data)
    labels = data["labels"].repeat(2)
    torch.testing.assert_close(found["penalty"], irm_penalty(logits.view(3, 4, 3), labels.view(3, 4)))


@pytest.mark.parametrize("both", [True, False])
def test_coral_compares_features_of_both_streams_or_of_plain_rows(both):
    data = batch(per_domain=4)
    task = built(algorithm={"name": "coral", "both_streams": both})
    found, _ = seen(task, data)
    features = task._recorder.take()  # of the second forward, same numbers
    parts = [features[k * 4 : k * 4 + 4] for k in range(3)]
    if both:
        parts = [torch.cat([part, features[12 + k * 4 : 16 + k * 4]]) for k, part in enumerate(parts)]
    torch.testing.assert_close(found["penalty"], coral_penalty(torch.stack(parts)))


def test_mixstyle_mixes_in_training_alone():
    task = built(algorithm={"name": "mixstyle", "layers": ["layer1"], "chance": 1.0}, method="baseline")
    images = batch()["images"]
    assert not torch.allclose(task(images), task(images))
    task.eval()
    assert torch.equal(task(images), task(images))


def test_weights_and_schedule_are_those_of_the_code_bases():
    assert [AlgorithmOptions("irm", preset).weight_at(500) for preset in ("tll", "domainbed")] == [1.0, 100.0]
    assert [AlgorithmOptions("vrex", preset).weight_at(500) for preset in ("tll", "domainbed")] == [3.0, 10.0]
    assert AlgorithmOptions("irm", "domainbed").weight_at(499) == 1.0
    assert AlgorithmOptions("coral", "tll").weight_at(0) == 1.0
    assert AlgorithmOptions("irm", "tll", weight=7.0, anneal_steps=3).weight_at(3) == 7.0
    tll = built(algorithm={"name": "irm"})
    assert [tll.schedule_began_at(step) for step in (499, 500, 900)] == [0, 500, 500]
    assert built(algorithm={"name": "irm", "preset": "domainbed"}).schedule_began_at(900) == 0


def at_step(task, step):
    """The task as it is right before a step of a training of 2000 steps."""
    task._trainer = SimpleNamespace(max_epochs=4, num_training_batches=500, accumulate_grad_batches=1, optimizers=[],
                                    global_step=step, global_rank=0, precision="32-true")  # fmt: skip
    return task


def test_the_cosine_begins_anew_where_the_weight_of_the_penalty_changes_and_ends_with_the_training():
    """TLL: a new optimizer and a cosine over what is left."""
    task, plain = built(algorithm={"name": "irm"}), built(algorithm={"name": "erm"})
    rates = [at_step(task, step).learning_rate() / 1e-3 for step in (0, 499, 500, 1250, 2000)]
    before = (1 + math.cos(math.pi * 499 / 2000)) / 2
    assert rates == pytest.approx([1.0, before, 1.0, 0.5, 0.0], abs=1e-9)
    assert at_step(plain, 1000).learning_rate() == pytest.approx(5e-4)


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_the_optimizer_is_as_new_where_the_weight_of_the_penalty_changes(name):
    """Step 3 is what a new optimizer makes of the same gradients, and the step before it is not."""
    task = built(algorithm={"name": "vrex", "anneal_steps": 3}, optimizer={"name": name, "schedule": "constant"})
    at_step(task, 0)
    optimizer = task.configure_optimizers()
    for step in range(4):
        at_step(task, step)
        task._trainer.optimizers = [optimizer]
        task.on_train_batch_start(None, step)
        before = [parameter.detach().clone() for parameter in task.net.parameters()]
        optimizer.zero_grad()
        task.step(batch())["loss"].backward()
        gradients = [parameter.grad for parameter in task.net.parameters()]
        optimizer.step()
        fresh = built(optimizer={"name": name, "schedule": "constant"})
        another = at_step(fresh, 0).configure_optimizers()
        for parameter, value, gradient in zip(fresh.net.parameters(), before, gradients, strict=True):
            parameter.data.copy_(value)
            parameter.grad = gradient
        another.step()
        same = all(map(torch.equal, task.net.parameters(), fresh.net.parameters()))
        assert same == (step in (0, 3))


def test_the_gradient_is_reversed_more_and_more():
    """TLL: at step 1000 the coefficient of MDD is not 0.1 but 0.046; that of DANN approaches 1."""
    info = DataInfo({**INFO, "domains": ["x"]})
    for name, most in (("mdd", 0.1), ("dann", 1.0)):
        task = built(DomainAdaptation, info, adapt={"name": name, "bottleneck_dim": 8})
        found = []
        for step in (0, 1000, 10**5):
            at_step(task, step).on_train_batch_start(None, 0)
            found.append(float(task.net.coefficient))
        assert found == pytest.approx([0.0, most * 0.4621, most], rel=1e-3)


def test_batch_norm_stays_frozen_in_training_and_its_scale_learns():
    task = built(freeze_batch_norm=True)
    norms = [layer for layer in task.net.modules() if isinstance(layer, nn.BatchNorm2d)]
    before = [norm.running_mean.clone() for norm in norms]
    task.step(batch())["loss"].backward()
    assert all(torch.equal(norm.running_mean, mean) for norm, mean in zip(norms, before, strict=True))
    assert norms[0].weight.grad is not None
    assert task.attachment.points[0].module.training
    moving = built()
    moving.step(batch())
    norm = next(layer for layer in moving.net.modules() if isinstance(layer, nn.BatchNorm2d))
    assert norm.running_mean.any()


def rates(task):
    class Trainer:
        precision = "32-true"

    task._trainer = Trainer()  # type: ignore[assignment]
    optimizer = task.configure_optimizers()
    return {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}


def test_every_parameter_is_optimised_the_module_by_its_own_factor():
    task = built(optimizer={"lr": 0.1, "module_lr_factor": 0.5, "backbone_lr_factor": 0.1})
    found = rates(task)
    assert set(found) == {id(p) for p in task.net.parameters()}
    assert {found[id(p)] for p in task.attachment.parameters()} == {0.05}
    assert found[id(task.net.fc.weight)] == pytest.approx(0.1)
    assert found[id(task.net.conv1.weight)] == pytest.approx(0.01)


@pytest.mark.parametrize("name", ["source_only", "dann", "mdd"])
@pytest.mark.parametrize("method", ["baseline", "batchformer"])
def test_adaptation_learns_from_target_rows_without_their_labels(name, method):
    info = DataInfo({**INFO, "domains": ["x"]})
    task = built(DomainAdaptation, info, method=method, adapt={"name": name, "bottleneck_dim": 8})
    task.net.coefficient.fill_(0.5)
    source, target = batch(4, 1), batch(3, 1)
    target["images"].requires_grad_()
    target["labels"] = torch.full((3,), -1)
    found = task.step({"source": source, "target": target})
    found["loss"].backward()
    assert ("transfer" in found) == (name != "source_only")
    assert len(found["acc"]) == 4
    assert (target["images"].grad is None) == (name == "source_only")  # that baseline never sees the target
    assert name == "source_only" or bool(target["images"].grad.any())
    assert set(rates(task)) == {id(p) for p in task.net.parameters()}


def test_related_rows_of_the_source_are_the_sources():
    info = DataInfo({**INFO, "domains": ["x"]})
    task = built(DomainAdaptation, info, adapt={"name": "dann", "bottleneck_dim": 8})
    source, target = batch(4, 1), batch(3, 1)
    torch.manual_seed(5)
    found = task.step({"source": source, "target": target})
    torch.manual_seed(5)
    logits, _ = task.net(torch.cat([source["images"], target["images"]]))
    wanted = F.cross_entropy(logits[[0, 1, 2, 3, 7, 8, 9, 10]], source["labels"].repeat(2))
    torch.testing.assert_close(found["risk"], wanted)


def test_data_without_domains_and_a_single_source_are_refused():
    plain = DataInfo({key: value for key, value in INFO.items() if key != "domains"})
    with pytest.raises(UserError, match="needs data with domains"):
        built(info=plain)
    with pytest.raises(UserError, match="compares source domains and there is one only"):
        built(info=DataInfo({**INFO, "domains": ["x"]}), algorithm={"name": "coral"})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"algorithm": {"name": "groupdro"}}, "algorithm.name='groupdro'"),
        ({"optimizer": {"name": "adamw"}}, "optimizer.name='adamw'"),
        ({"optimizer": {"schedule": "poly"}}, "optimizer.schedule='poly'"),
        ({"judge_by": "best"}, "judge_by='best'"),
    ],
)
def test_names_that_nobody_knows_are_refused(options, named):
    with pytest.raises(UserError, match=named):
        DomainGeneralization(**SMALL, **options)


@pytest.mark.parametrize("options", [{"name": "cdan"}, {"reversal_steps": 0}])
def test_adaptation_refuses_what_it_cannot_do(options):
    with pytest.raises(UserError, match=r"model\.adapt"):
        DomainAdaptation(**SMALL, adapt=options)


@pytest.mark.parametrize(
    ("kind", "adapt", "said"), [(DomainGeneralization, True, "to false"), (DomainAdaptation, False, "to true")]
)
def test_images_of_the_target_are_for_adaptation_alone(kind, adapt, said):
    with pytest.raises(UserError, match=rf"set data\.adapt {said}"):
        built(kind).check_data(SimpleNamespace(batch_size=6, image_size=8, adapt=adapt))


def test_one_image_of_each_domain_is_too_few_for_a_covariance():
    class Data:
        batch_size, image_size = 3, 8

    with pytest.raises(UserError, match="holds one image of each source domain"):
        built(algorithm={"name": "coral"}).check_data(Data())


def test_styles_of_what_is_no_feature_map_are_refused_before_the_training():
    class Data:
        batch_size, image_size = 6, 16

    vit = {"backbone": "vit_tiny_patch16_224", "backbone_args": {"img_size": 16, "patch_size": 8, "depth": 1}}
    task = DomainGeneralization(**vit, algorithm={"name": "mixstyle", "layers": ["blocks.0"]})
    task.construct(INFO)
    with pytest.raises(UserError, match=r"MixStyle: blocks\.0 gives \(1, 5, 192\), not feature maps"):
        task.check_data(Data())
    resnet = built(algorithm={"name": "mixstyle", "layers": ["layer1"]}, freeze_batch_norm=True)
    modes = [module.training for module in resnet.modules()]
    before = {name: value.clone() for name, value in resnet.net.state_dict().items()}
    resnet.check_data(Data())
    assert modes == [module.training for module in resnet.modules()]
    assert all(torch.equal(value, before[name]) for name, value in resnet.net.state_dict().items())


def test_the_measure_that_decides_is_chosen_and_the_oracle_never_does():
    for judge, key in (("last", "accuracy"), ("source", "accuracy_selected"), ("swad", "accuracy_swad")):
        assert [m.key for m in built(judge_by=judge, swad={}).measures if m.primary] == [key]
    with pytest.raises(UserError, match=r"set model\.swad"):
        built(judge_by="swad")


def test_images_are_taken_evenly_over_a_set_whose_length_is_not_known():
    def loader(count, size=7):
        whole = torch.arange(count).view(-1, 1, 1, 1)
        return [{"images": part} for part in whole.split(size)]

    for count in (5, 60, 61, 119, 120, 1000, 4001):
        found = evenly_spaced_samples(loader(count), 60, "images")["images"].flatten()
        assert len(found) == min(count, 60)
        steps = found.diff()
        assert steps.min() >= 1
        assert steps.max() <= 2 * max(1, -(-count // 60))
        assert found[0] == 0
        assert found[-1] >= count - 2 * max(1, -(-count // 60)) - 1


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short training of the embedded digits."""
    out = tmp_path_factory.mktemp("domains") / "run"
    words = ["fit", "digits-domains", "--data.steps_per_epoch", "3", "--run.checkpoint_every_epochs", "1",
             "--model.oracle", "true", "--trainer.accelerator", "cpu", "--model.method", "batchformer"]  # fmt: skip
    assert main([*words, "--trainer.max_epochs", "6", "--out", str(out)]) == 0
    return json.loads((out / "result.json").read_text())


def test_the_target_is_reported_at_the_step_best_on_source_and_chooses_nothing(run):
    metrics = run["metrics"]
    (section,) = [each for each in run["sections"] if each["title"].startswith("Source and target")]
    source, target = section["series"]["lines"]["source validation"], section["series"]["lines"]["target"]
    assert section["series"]["x"] == [3, 6, 9, 12, 15, 18]
    assert metrics["accuracy_selected"] == pytest.approx(target[source.index(max(source))], abs=1e-4)
    assert metrics["accuracy_oracle"] == pytest.approx(max(target), abs=1e-4)
    assert metrics["accuracy"] == pytest.approx(target[-1], abs=1e-4)
    assert metrics["source/accuracy"] == pytest.approx(source[-1], abs=1e-4)
    assert {"accuracy_swad", "source/accuracy_swad", "accuracy_classes"} <= metrics.keys()
    assert run["target"] == "75-degrees"
    assert run["swad"]["steps"] == [3, 6, 9, 12, 15, 18]


def test_features_of_two_domains_are_on_one_plane_before_and_after_the_module(run):
    planes = [each for each in run["sections"] if each["title"].startswith("Features of two domains")]
    assert [each["title"].partition(", ")[2] for each in planes] == ["", "after the module"]
    for plane in planes:
        groups = plane["points"]["groups"]
        assert {name: len(points) for name, points in groups.items()} == {"source": 60, "75-degrees": 60}
        points = torch.tensor([point for group in groups.values() for point in group])
        assert points.mean(0).abs().max() < 1e-2  # principal components are centred, and
        assert (points[:, 0] * points[:, 1]).sum().abs() < 1e-3 * points.square().sum()  # not correlated
        assert points[:, 0].square().sum() >= points[:, 1].square().sum()
        assert 0 < float(re.search(r"explains ([0-9.]+) %", plane["text"])[1]) < 100
    assert planes[0]["points"] != planes[1]["points"]


def test_the_plane_is_that_of_the_features_before_the_classifier():
    """By hand: the share that the domain explains, and both coordinates up to their sign."""
    torch.manual_seed(0)
    rows = {"source": 30, "target": 20}
    features = torch.randn(50, 6) * torch.tensor([5.0, 3, 1, 1, 1, 1])
    features[30:, 0] += 4
    plane = _plane("t", features, rows)
    centred = features - features.mean(0)
    _, _, basis = torch.linalg.svd(centred)
    wanted = centred @ basis[:2].T
    found = torch.tensor([point for group in plane["points"]["groups"].values() for point in group])
    torch.testing.assert_close(found.abs(), wanted.abs(), atol=2e-3, rtol=1e-3)
    between = sum(
        len(part) * (part.mean(0) - features.mean(0)).square().sum() for part in (features[:30], features[30:])
    )
    share = 100 * between / centred.square().sum()
    assert f"explains {share:.1f} % of it" in plane["text"]
