"""RIDE as an algorithm of long-tailed recognition: experts, teacher, router; in the commands too."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import batchformer as bf
from batchformer.cli import main
from batchformer.errors import UserError
from batchformer.losses import LDAMLoss, RideLoss
from batchformer.models import RoutedExperts, expert_network
from batchformer.tasks import LongTailed, LossOptions, OptimizerOptions, ScheduleOptions
from batchformer.tasks.long_tailed.ride import Ride

from ..runs.die_at import ends_of
from .conftest import COUNTS, TinyData, info, make_trainer
from .whole_step import whole_step

WIDTHS = {"widths": [4, 8, 8]}
LDAM = LossOptions("ldam", reweight_epoch=1)


def ride_task(kind=LongTailed, **arguments) -> LongTailed:
    given = {"algorithm": "ride", "backbone_args": WIDTHS, "loss": LDAM, "schedule": ScheduleOptions("constant")}
    given["sampling"] = "instance"  # TinyData has its own order
    given["batchformer"] = {"heads": 1, **arguments.pop("batchformer", {})}
    return kind("resnet20", **{**given, **arguments})


def built(**arguments) -> LongTailed:
    task = ride_task(**arguments)
    task.construct(info(COUNTS))
    return task.train()


def fit(task: LongTailed, **arguments):
    trainer = make_trainer(**{"max_epochs": 1, "limit_val_batches": 0, **arguments})
    trainer.fit(task, datamodule=TinyData())
    return trainer


def a_file(tmp_path, experts: int = 3, classes: int = 4, **changed) -> str:
    """Weights of a RIDE network."""
    torch.manual_seed(experts)
    net = expert_network("resnet20", classes, experts=experts, **{**WIDTHS, **changed})
    save_file(net.state_dict(), tmp_path / f"{experts}.safetensors")
    return str(tmp_path / f"{experts}.safetensors")


class TestExperts:
    @pytest.mark.parametrize("method", ["baseline", "batchformer"])
    @pytest.mark.parametrize("streams", ["duplicate", "single"])
    @pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
    def test_two_steps_change_every_weight(self, method, streams, precision):
        task = built(method=method, batchformer={"streams": streams})
        before = {name: p.detach().clone() for name, p in task.net.named_parameters()}
        assert fit(task, precision=precision).global_step == 2
        assert [name for name, p in task.net.named_parameters() if torch.equal(p, before[name])] == []
        assert len({name.split(".")[1] for name in before if name.startswith("batchformer.")}) == (method != "baseline")

    def test_the_step_is_the_loss_of_all_rows_with_margins_of_the_scaled_logits(self):
        task, data = built(ride={"diversity": 0.0}), TinyData()
        torch.manual_seed(1)
        found = task.step({"images": data.images, "labels": data.labels})
        torch.manual_seed(1)
        logits, labels = task(data.images), data.labels.repeat(2)
        parts = [LDAMLoss(COUNTS)(logits[:, k] / 30, labels) for k in range(3)]  # LDAM's own scale is 30
        torch.testing.assert_close(found["loss"], sum(parts))
        right = logits[:16].mean(1).argmax(1) == data.labels
        assert torch.equal(found["acc"], 100.0 * right)

    def test_weights_and_temperatures_are_deferred(self):
        task = ride_task()
        fit(task, max_epochs=1)
        assert task.criterion.temperature.eq(1).all()
        fit(task, max_epochs=2)
        assert task.criterion.temperature.argmin() == task.criterion.base.weights.argmax() == 3

    def test_any_loss_of_the_recipe_is_that_of_an_expert(self):
        task = built(loss=LossOptions("balanced_softmax"), method="baseline", ride={"diversity": 0.0})
        data = TinyData()
        found = task.step({"images": data.images, "labels": data.labels})["loss"]
        logits = task(data.images) + torch.tensor(COUNTS).log()
        torch.testing.assert_close(found, sum(F.cross_entropy(logits[:, k], data.labels) for k in range(3)))

    def test_the_initial_weights_are_those_of_the_baseline_and_evaluation_is_the_mean(self, data):
        task, plain = built(), built(method="baseline")
        for name, value in plain.net.state_dict().items():
            assert torch.equal(task.net.state_dict()[name], value)
        values = make_trainer().validate(task, datamodule=data, verbose=False)[0]
        task.attachment.detach()
        right = task.net.eval()(data.images).argmax(1) == data.labels
        assert values["val/accuracy"] == pytest.approx(100 * right.double().mean().item())
        assert values["val/experts_used"] == 3
        assert values["val/gflops"] == pytest.approx(task.net.giga_multiply_adds(data.images[:1])[-1])

    @pytest.mark.parametrize("train", ["experts", "router"])
    def test_the_whole_step_ends_with_the_bits_of_the_ordinary_one(self, train, tmp_path):
        ends = []
        for kind in (LongTailed, whole_step(LongTailed)):
            task = ride_task(kind, ride={"train": train})
            task.init_from = {"network": a_file(tmp_path)}
            fit(task, max_epochs=2)
            ends.append(task.net.state_dict())
        assert all(torch.equal(ends[1][name], value) for name, value in ends[0].items())

    @pytest.mark.parametrize(
        ("options", "told"),
        [({"experts": 1}, "experts=1 must be 2 or more"), ({"width": 1.5}, "width=1.5 must be above 0 and at most 1"),
         ({"threshold": 2.0}, "threshold=2.0 must be between 0 and 1"), ({"train": "both"}, '"experts" or "router"'),
         ({"temperature_factor": 1.0}, "temperature_factor=1.0"), ({"router_top": 0}, "router_top=0"),
         ({"pos_weight": 0.0}, "pos_weight=0.0"), ({"teacher_temperature": 0.0}, "teacher_temperature=0.0"),
         ({"headz": 3}, "RideOptions has no 'headz'")],
    )  # fmt: skip
    def test_bad_options_are_named(self, options, told):
        with pytest.raises(UserError, match=told):
            ride_task(ride=options)

    def test_too_many_experts_and_other_backbones_are_told(self):
        with pytest.raises(UserError, match="7 experts are more than the width allows"):
            built(ride={"experts": 7})
        with pytest.raises(UserError, match="efficientnet_b0 is EfficientNet"):
            LongTailed("efficientnet_b0", algorithm="ride").construct(info(COUNTS))


class TestTeacher:
    def test_it_is_compared_with_the_mean_of_the_rows_of_both_streams(self, tmp_path):
        source = a_file(tmp_path, experts=5)
        options = {"diversity": 0.0, "teacher_weight": 0.5, "teacher_temperature": 2.0}
        task, data = built(ride=options, batchformer={"dropout": 0.0}), TinyData()
        task.init_from = {"teacher": source}
        task.algorithm.before_training(task)
        teacher = expert_network("resnet20", 4, experts=5, **WIDTHS).eval()
        teacher.load_state_dict(load_file(source))
        found = task.step({"images": data.images, "labels": data.labels})["loss"]
        logits, told = task(data.images), teacher(data.images).repeat(2, 1)
        kl = F.kl_div(logits.mean(1).div(2).log_softmax(1), told.div(2).softmax(1), reduction="batchmean")
        alone = RideLoss(LDAMLoss(COUNTS, 15.0, 1.0), COUNTS, diversity=0.0)(logits, data.labels.repeat(2))
        torch.testing.assert_close(found, alone + 0.5 * 4 * kl)

    def test_it_does_not_learn_and_is_in_no_checkpoint(self, tmp_path):
        task = ride_task(ride={"teacher_weight": 1.0})
        task.init_from = {"teacher": a_file(tmp_path, experts=6)}
        fit(task)
        (teacher,) = task.algorithm._teacher
        stored = load_file(task.init_from["teacher"])
        assert all(torch.equal(value, stored[name]) for name, value in teacher.state_dict().items())
        assert {name.split(".")[0] for name in task.state_dict()} == {"net"}

    def test_what_is_missing_or_does_not_fit_is_told_before_training(self, tmp_path):
        fitting = a_file(tmp_path)
        save_file({"fc.weight": torch.zeros(4, 3)}, tmp_path / "plain.safetensors")
        for weight, source, told in [
            (1.0, None, r"teacher_weight 1 needs a teacher: add --init-from teacher=RUN"),
            (0.0, fitting, r"has no effect at model\.ride\.teacher_weight 0"),
            (1.0, str(tmp_path / "gone.pth"), "there is no file"),
            (1.0, str(tmp_path / "plain.safetensors"), "is no network of RIDE"),
            (1.0, a_file(tmp_path, 5, classes=7), "this classifies 7 classes"),
            (1.0, a_file(tmp_path, 2, width=1.0), "does not fit the network"),
        ]:
            task = built(ride={"teacher_weight": weight})
            task.init_from = {} if source is None else {"teacher": source}
            with pytest.raises(UserError, match=told):
                task.algorithm.before_training(task)


class TestRouter:
    def test_it_alone_learns_on_the_experts_of_a_run_with_or_without_the_module(self, tmp_path):
        source = a_file(tmp_path)
        task = ride_task(ride={"train": "router"}, optimizer=OptimizerOptions(lr=0.1))
        task.init_from = {"network": source}
        task.construct(info(COUNTS))
        assert task.attachment is None
        assert isinstance(task.net, RoutedExperts)
        router = {name: value.clone() for name, value in task.net.router.state_dict().items()}
        trainer = fit(task, limit_val_batches=1.0)
        stored = load_file(source)
        assert all(torch.equal(task.net.state_dict()[name], value) for name, value in stored.items())
        assert not any(torch.equal(value, router[name]) for name, value in task.net.router.state_dict().items())
        learning = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
        assert learning == {id(p) for p in task.net.router.parameters()}

    def test_its_images_are_drawn_by_class_unless_the_recipe_says_otherwise(self):
        labels = np.repeat(np.arange(4), COUNTS)
        data = SimpleNamespace(class_counts=COUNTS, train_labels=labels, seed=0)
        for sampling, chosen in ((None, True), ("class_balanced", True), ("square_root", True), ("instance", False)):
            task = ride_task(ride={"train": "router"}, sampling=sampling)
            order = task.sampler(data)
            assert task.algorithm.chooses_samples(task) == (order is not None) == chosen
            if sampling is None:
                drawn = np.bincount(labels[np.concatenate([order(epoch) for epoch in range(50)]) % len(labels)])
                assert drawn / drawn.sum() == pytest.approx(np.full(len(drawn), 1 / len(drawn)), abs=0.05)

    def test_it_is_evaluated_as_it_routes_and_at_every_threshold(self, data, tmp_path):
        task = ride_task(ride={"train": "router"})
        task.init_from = {"network": a_file(tmp_path)}
        task.construct(info(COUNTS))
        net = task.net.eval()
        scores = net.with_all_experts(data.images)[1].flatten().sort().values
        # between two scores: rounding differs between batches, and must not decide which way an image goes
        net.router.score.bias.data -= scores[len(scores) // 2 - 1 : len(scores) // 2 + 1].mean()
        values = make_trainer().validate(task, datamodule=data, verbose=False)[0]
        logits, used = net.routed(data.images)
        assert 1 < values["val/experts_used"] < 3
        assert values["val/experts_used"] == pytest.approx(used.double().mean().item())
        assert values["val/accuracy"] == pytest.approx(100 * (logits.argmax(1) == data.labels).double().mean().item())
        one, two, _ = net.giga_multiply_adds(data.images[:1])
        assert values["val/gflops"] == pytest.approx(one + (used.double().mean().item() - 1) * (two - one), rel=1e-5)
        (section,) = task.sections()
        experts, accuracies = section["series"]["x"], section["series"]["lines"]["All"]
        assert experts[0] == 3
        assert experts[-1] == 1
        assert experts == sorted(experts, reverse=True)
        full = net.with_all_experts(data.images)[0].mean(1).argmax(1) == data.labels
        assert accuracies[0] == values["val/accuracy_all_experts"] == pytest.approx(100 * full.double().mean().item())
        assert accuracies[10] == pytest.approx(values["val/accuracy"])  # 0.5, that of the run
        assert len(section["table"]["rows"]) == len(experts) == 21

    def test_without_trained_experts_it_is_refused(self, capsys, tmp_path):
        words = ["fit", "digits-lt", "--model.algorithm", "ride", "--model.ride.train", "router"]
        assert main([*words, "--out", str(tmp_path / "run")]) == 2
        assert "on experts that are trained already" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()


SHORT = ["--model.backbone_args.widths", "[4,8]", "--trainer.max_epochs", "2", "--trainer.limit_train_batches", "3",
         "--data.batch_size", "32", "--run.checkpoint_every_steps", "1", "--no-analysis"]  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Experts, then a router, on the embedded digits."""
    file = tmp_path_factory.mktemp("recipe") / "routed.yaml"
    file.write_text(
        "extends: digits-lt\nmodel: {algorithm: ride, batchformer: {heads: 1}, schedule: {warmup_epochs: 0}}\n"
        "stages:\n  - {name: experts}\n  - {name: router, model.ride.train: router, model.optimizer.lr: 0.01}\n"
    )
    return str(file)


@pytest.fixture(scope="module")
def written():
    """One entry for each checkpoint that the run wrote, in both stages."""
    return []


@pytest.fixture(scope="module")
def run(recipe, written, tmp_path_factory):
    out, save = tmp_path_factory.mktemp("run") / "run", torch.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", lambda content, file: (written.append(0), save(content, file)))
        assert main(["fit", recipe, *SHORT, "--out", str(out)]) == 0
    return out


def state_of(folder: Path) -> dict:
    return torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["state_dict"]


def interrupted_at(step, original):
    """The training step of a router, stopped at this one."""

    def stepping(self, task, batch):
        if task.ride_options.train == "router" and task.trainer.global_step == step:
            raise KeyboardInterrupt
        return original(self, task, batch)

    return stepping


class TestCommands:
    def test_the_second_stage_keeps_the_experts_of_the_first(self, run):
        first, second = state_of(run / ".stages/1-experts"), state_of(run)
        assert any("batchformer" in name for name in first)
        kept = bf.plain_state_dict(first)
        assert all(torch.equal(second[name], value) for name, value in kept.items())
        assert {name for name in second if name not in kept} == {name for name in second if ".router." in name}
        result = json.loads((run / "result.json").read_text())
        assert {"experts_used", "gflops", "accuracy_all_experts"} <= result["metrics"].keys()
        assert [section["title"] for section in result["sections"]] == ["Accuracy against experts used"]

    @pytest.mark.parametrize("how", ["interrupted", pytest.param("killed", marks=pytest.mark.slow)])
    def test_a_run_that_ends_inside_the_routing_stage_goes_on_to_the_same_bits(
        self, how, recipe, run, written, tmp_path, monkeypatch
    ):
        out = tmp_path / "run"
        words = ["fit", recipe, *SHORT, "--out", str(out)]
        if how == "killed":
            ((code, said),) = ends_of([("write", len(written) - 2, words)], tmp_path)
            assert code == -signal.SIGKILL, said
        else:
            with monkeypatch.context() as patch:
                patch.setattr(Ride, "step", interrupted_at(4, Ride.step))
                assert main(words) == 130
        assert (out / ".stages/1-experts/result.json").is_file()
        assert 0 < torch.load(out / "checkpoints/last.ckpt", weights_only=True)["global_step"] < 6
        assert not (out / "result.json").exists()
        assert main([*words, "--resume"]) == 0
        found, expected = state_of(out), state_of(run)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        results = [json.loads((folder / "result.json").read_text()) for folder in (run, out)]
        for key in ("metrics", "per_class", "sections", "history"):
            assert results[0][key] == results[1][key], key

    def test_what_is_exported_and_predicted_is_routed(self, run, tmp_path, capsys):
        file = tmp_path / "model.safetensors"
        assert main(["export", str(run), "--out", str(file)]) == 0
        assert "expert_network('resnet20', 10, experts=3" in capsys.readouterr().out
        net = expert_network("resnet20", 10, experts=3, top=30, widths=[4, 8])
        net.load_state_dict(load_file(file), strict=True)
        assert main(["test", str(run)]) == 0
        assert "exactly these numbers" in capsys.readouterr().out


@pytest.mark.gpu
class TestOnCuda:
    @pytest.fixture(autouse=True)
    def one_algorithm(self, monkeypatch):
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)

    @staticmethod
    def fit(source: str, precision: str, train: str = "experts", *, epochs: int = 6, lr: float = 0.02, **options):
        task = ride_task(optimizer=OptimizerOptions(lr=lr), ride={"train": train}, **options)
        task.init_from = {"network": source}
        trainer = make_trainer(accelerator="cuda", devices=1, max_epochs=epochs, precision=precision)
        trainer.fit(task, datamodule=TinyData(batch_size=6))
        return {name: value.cpu() for name, value in task.net.state_dict().items()}, trainer.callback_metrics

    @pytest.mark.parametrize("train", ["experts", "router"])
    @pytest.mark.parametrize("method", ["baseline", "batchformer"])
    @pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
    def test_graph_and_eager_training_agree_over_the_deferred_epoch(self, train, method, precision, tmp_path):
        source, tolerance = a_file(tmp_path), 1e-3 if precision == "32-true" else 5e-2
        loss = LossOptions("ldam", reweight_epoch=3)
        plain, graphed = (
            self.fit(source, precision, train, method=method, loss=loss, cuda_graph=on) for on in (False, True)
        )
        for name, value in plain[0].items():
            torch.testing.assert_close(graphed[0][name], value, rtol=tolerance, atol=tolerance)
        assert graphed[1]["train/loss"].item() == pytest.approx(plain[1]["train/loss"].item(), rel=tolerance)

    @pytest.mark.parametrize("train", ["experts", "router"])
    def test_a_compiled_network_in_a_graph(self, train, tmp_path):
        source, options = a_file(tmp_path), {"cuda_graph": True, "channels_last": True}
        options["batchformer"] = {"dropout": 0.0}  # compiled code draws other numbers
        # Few and small steps, where weights 1e-3 apart end 0.6 % apart; six epochs at lr 0.02 turn 1e-6 into 2 %.
        options |= {"epochs": 3, "lr": 5e-5}
        eager, compiled = (self.fit(source, "32-true", train, compile=on, **options) for on in (False, True))
        assert compiled[1]["train/loss"].item() == pytest.approx(eager[1]["train/loss"].item(), rel=1e-2)
