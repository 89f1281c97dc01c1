"""Decoupled training: what moves and what stays, cached features, the rule for tau, scales, and what is refused."""

import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from batchformer.cli import main
from batchformer.data import DigitsLT
from batchformer.errors import UserError
from batchformer.tasks import LongTailed
from batchformer.tasks.long_tailed.rescaled import TAUS

from .conftest import COUNTS, TinyData, info, make_trainer
from .whole_step import WholeStep

SMALL = {"backbone": "resnet20", "backbone_args": {"widths": [8, 8]}, "schedule": {"name": "constant"}}
STAGES = ["decoupled", "crt", "lws", "tau_norm", "balms"]


def fit(task, data=None, **arguments):
    trainer = make_trainer(**{"max_epochs": 1, "limit_val_batches": 0, "use_distributed_sampler": False, **arguments})
    trainer.fit(task, datamodule=data or DigitsLT(batch_size=64))
    return trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A file with the weights of a network that was trained for an epoch, with the module."""
    task = LongTailed(**SMALL, optimizer={"lr": 0.02})
    fit(task)
    file = tmp_path_factory.mktemp("trained") / "net.safetensors"
    save_file({name: value.clone() for name, value in task.net.state_dict().items()}, file)
    return file


def stage(trained, algorithm, method="baseline", data=None, kind=LongTailed, **options):
    task = kind(**{**SMALL, "balms": {"frozen": True, "meta_batch": 32}, **options}, algorithm=algorithm,
                      method=method)  # fmt: skip
    task.init_from = {"network": str(trained)}
    task.construct((data or DigitsLT()).info)
    return task


def state(task):
    return {name: value.clone() for name, value in task.net.state_dict().items()}


def changed(task, before):
    return {name for name, value in task.net.state_dict().items() if not torch.equal(value, before[name])}


@pytest.mark.parametrize("method", ["baseline", "batchformer"])
@pytest.mark.parametrize("algorithm", STAGES)
def test_frozen_parts_do_not_move(trained, algorithm, method):
    task = stage(trained, algorithm, method)
    before = state(task)
    fit(task)
    moved = changed(task, before)
    classifier = {"fc.weight", "fc.bias"}
    module = {name for name in before if name.startswith("batchformer.")}
    learns = module if algorithm not in ("lws", "tau_norm") else set()
    assert moved == classifier | learns
    assert all(torch.isfinite(value).all() for value in task.net.state_dict().values())


def test_as_released_the_statistics_of_batch_norm_move_and_no_weight_does(trained):
    task = stage(trained, "crt", "batchformer", decoupled={"backbone_mode": "train"})
    before = state(task)
    fit(task, limit_train_batches=2)
    moved = {name for name in changed(task, before) if not name.startswith(("fc.", "batchformer."))}
    assert moved
    assert all(name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked") for name in moved)


@pytest.mark.parametrize(("algorithm", "anew"), [("crt", True), ("decoupled", True), ("lws", False)])
def test_a_new_classifier_begins_as_it_was_built_and_other_methods_keep_theirs(trained, algorithm, anew):
    fresh = LongTailed(**SMALL, method="baseline")
    fresh.construct(DigitsLT().info)
    task = stage(trained, algorithm, optimizer={"lr": 0.0})
    fit(task, limit_train_batches=1)
    assert torch.equal(task.net.fc.weight, fresh.net.fc.weight) == anew
    assert not torch.equal(task.net.conv1.weight, fresh.net.conv1.weight)


@pytest.mark.parametrize("algorithm", STAGES)
def test_cached_features_train_as_features_of_images_that_are_not_augmented(trained, algorithm):
    ends = []
    for features in ("forward", "cached"):
        task = stage(trained, algorithm, decoupled={"features": features})
        fit(task, DigitsLT(batch_size=64, augment="none"), max_epochs=2)
        ends.append(task)
    torch.testing.assert_close(ends[0].net.fc.weight, ends[1].net.fc.weight, rtol=1e-4, atol=1e-6)
    for name, value in ends[0].algorithm.state_dict().items():
        torch.testing.assert_close(ends[1].algorithm.state_dict()[name], value, rtol=1e-4, atol=1e-5)


def test_crt_draws_every_class_equally_often_and_a_recipe_may_say_otherwise(trained):
    data = DigitsLT(batch_size=64)
    data.setup()
    for sampling, powers in ((None, 0.0), ("square_root", 0.5), ("instance", None)):
        task = LongTailed(**SMALL, algorithm="crt", sampling=sampling)
        order = task.sampler(data)
        if powers is None:
            assert order is None
            continue
        drawn = sum(torch.bincount(torch.from_numpy(data.train_labels[order(e) % 490]), minlength=10) for e in range(9))
        wanted = torch.tensor(data.class_counts).double() ** powers
        torch.testing.assert_close(drawn / drawn.sum(), (wanted / wanted.sum()), atol=0.015, rtol=0, check_dtype=False)
    assert LongTailed(**SMALL).sampler(data) is None
    assert LongTailed(**SMALL, sampling="class_balanced").sampler(data) is not None  # with every method


def test_lws_learns_scales_and_nothing_else(trained):
    task = stage(trained, "lws", "batchformer")
    weight, bias = task.net.fc.weight.clone(), task.net.fc.bias.clone()
    trainer = fit(task)
    (parameter,) = (p for group in trainer.optimizers[0].param_groups for p in group["params"])
    assert parameter is task.algorithm.scales
    scales = parameter.detach()
    assert not torch.allclose(scales, torch.ones(10), atol=1e-3)
    torch.testing.assert_close(task.net.fc.weight, weight * scales[:, None])
    torch.testing.assert_close(task.net.fc.bias, bias * scales)


def test_the_gradient_of_a_scale_is_that_of_its_logit(trained):
    task = stage(trained, "lws")
    images, labels = torch.randn(6, 3, 8, 8), torch.arange(6)
    found = torch.autograd.grad(task.step({"images": images, "labels": labels})["loss"], task.algorithm.scales)[0]
    logits = task.eval()(images).detach()
    scales = torch.ones(10, requires_grad=True)
    (wanted,) = torch.autograd.grad(F.cross_entropy(scales * logits, labels), scales)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("method", ["baseline", "batchformer"])
@pytest.mark.parametrize("algorithm", STAGES)
def test_the_step_that_a_graph_captures_is_the_same(trained, algorithm, method):
    ends = []
    for kind in (LongTailed, WholeStep):
        task = stage(trained, algorithm, method, kind=kind)
        fit(task, limit_train_batches=3)
        ends.append(task.state_dict())
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, msg=name)


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
@pytest.mark.parametrize("algorithm", STAGES)
def test_other_precisions_train(trained, algorithm, precision):
    for features in ("forward", "cached"):
        task = stage(trained, algorithm, "batchformer", decoupled={"features": features})
        fit(task, limit_train_batches=2, precision=precision)
        assert torch.isfinite(task.net.fc.weight).all()


@pytest.mark.traced
def test_a_compiled_network_gives_the_same_features(trained):
    task, images = stage(trained, "crt", "batchformer"), torch.randn(4, 3, 8, 8)
    plain = task.algorithm.features_of(task, {"images": images})
    task.net.compile(backend="eager", dynamic=False)
    for _ in range(2):
        torch.testing.assert_close(task.algorithm.features_of(task, {"images": images}), plain)
        task.eval()
        task(images)
        task.train()


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["baseline", "batchformer"])
@pytest.mark.parametrize("algorithm", STAGES)
def test_captured_and_compiled_on_cuda(trained, algorithm, method):
    ends = []
    for options in ({}, {"cuda_graph": True}, {"cuda_graph": True, "compile": True}):
        task = stage(trained, algorithm, method, **options)
        fit(task, accelerator="cuda", devices=1)
        ends.append(task.net.fc.weight.detach().cpu())
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=2e-2, atol=2e-3)


class TestTau:
    def test_the_rule_is_the_lowest_class_balanced_loss_on_the_training_images(self, trained):
        """Slowly: class by class, tau by tau."""
        data = DigitsLT(batch_size=70, augment="none")  # 7 batches: all 490 images
        task = stage(trained, "tau_norm")
        weight = task.net.fc.weight.detach().clone()
        fit(task, data)
        seen = {}
        for batch in data.evaluation_loader("train"):
            with torch.no_grad():
                features = task.algorithm.features_of(task, batch)
            for row, label in zip(features, batch["labels"].tolist(), strict=True):
                seen.setdefault(label, []).append(row)
        losses = []
        for tau in TAUS.tolist():
            scaled = torch.stack([row / row.norm() ** tau for row in weight])
            scaled *= weight.norm(dim=1).mean() / scaled.norm(dim=1).mean()
            of_class = [
                sum(F.cross_entropy(scaled @ row, torch.tensor(label)).item() for row in rows) / len(rows)
                for label, rows in seen.items()
            ]
            losses.append(sum(of_class) / len(of_class))
        best = min(range(len(losses)), key=losses.__getitem__)
        assert task.algorithm.tau.item() == pytest.approx(TAUS[best].item())

    @pytest.mark.parametrize("tau", [0.0, 0.7, 1.0])
    def test_weights_are_divided_by_a_power_of_their_lengths(self, trained, tau):
        task = stage(trained, "tau_norm", decoupled={"tau": tau})
        weight = task.net.fc.weight.detach().clone()
        fit(task, limit_train_batches=1)
        found = task.net.fc.weight.detach()
        wanted = weight / weight.norm(dim=1, keepdim=True) ** tau
        torch.testing.assert_close(found / found[0].norm(), wanted / wanted[0].norm())
        assert found.norm(dim=1).mean().item() == pytest.approx(weight.norm(dim=1).mean().item(), rel=1e-5)
        assert not task.net.fc.bias.any()
        assert f"tau = {tau:.2g}" in task.sections()[0]["text"]


def test_an_empty_few_group_has_no_accuracy_and_the_others_have(trained):
    data = DigitsLT(batch_size=64, imbalance=1.5)  # 145 to 96 images
    task = stage(trained, "crt", data=data)
    metrics = fit(task, data, limit_val_batches=1.0).callback_metrics
    assert math.isnan(metrics["val/few"])
    assert metrics["val/many"] > 0
    assert metrics["val/medium"] > 0


class TestRefused:
    @pytest.mark.parametrize("algorithm", STAGES)
    def test_counts_missing_for_a_class(self, algorithm):
        with pytest.raises(UserError, match="class counts"):
            LongTailed(algorithm=algorithm).construct(info(COUNTS, classes=3))

    @pytest.mark.parametrize("algorithm", STAGES)
    def test_a_network_that_is_not_trained(self, algorithm):
        data, task = DigitsLT(), LongTailed(**SMALL, algorithm=algorithm, balms={"frozen": True})
        task.construct(data.info)
        with pytest.raises(UserError, match=f"{algorithm} works on the features of a trained network.*--init-from RUN"):
            task.check_data(data)
        task.init_from = {"network": "run"}
        task.check_data(data)

    def test_it_is_said_before_anything_is_written(self, capsys, tmp_path):
        assert main(["fit", "digits-lt", "--model.algorithm", "crt", "--out", str(tmp_path / "run")]) == 2
        assert "--init-from RUN or --init-from pretrained" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize("options", [{"sampling": "class_balanced"}, {"algorithm": "balms"}])
    def test_data_that_draw_for_themselves(self, options):
        with pytest.raises(UserError, match="TinyData does not let it"):
            fit(LongTailed("resnet20", **options), TinyData())

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"decoupled": {"features": "kept"}}, "features='kept'"),
            ({"decoupled": {"backbone_mode": "frozen"}}, "backbone_mode='frozen'"),
            ({"decoupled": {"features": "cached", "backbone_mode": "train"}}, "leave backbone_mode out"),
            ({"decoupled": {"tau": -1.0}}, "tau=-1"),
            ({"sampling": "cubic"}, "sampling='cubic'"),
            ({"algorithm": "mystery"}, "one of plain, ride, paco, decoupled, crt, lws, tau_norm, balms"),
        ],
    )
    def test_options_that_nobody_knows(self, options, named):
        with pytest.raises(UserError, match=named):
            LongTailed(**{"algorithm": "crt", **options})

    def test_cosines_of_ldam_and_a_module_elsewhere(self):
        with pytest.raises(UserError, match="ldam has cosines"):
            LongTailed(**SMALL, algorithm="crt", loss={"name": "ldam"}).construct(info(COUNTS))
        elsewhere = {"before": "layer2.2.conv2"}
        with pytest.raises(UserError, match=r"the module is before layer2\.2\.conv2"):
            LongTailed(**SMALL, algorithm="crt", batchformer=elsewhere).construct(info(COUNTS))
