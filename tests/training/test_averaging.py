"""SWAD: which segments of a made-up loss curve are averaged, the average itself, and both results of a run."""

import copy
import json
import random
from collections import Counter, OrderedDict, deque

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import batchformer as bf
from batchformer.errors import UserError
from batchformer.report.runs import _sections
from batchformer.runs.recorder import RunRecorder
from batchformer.tasks import Classification, LongTailed, OptimizerOptions
from batchformer.training.averaging import SWAD, LossValley, SwadOptions
from batchformer.training.options import BatchFormerOptions

from ..tasks.conftest import COUNTS, TinyData, info, make_trainer
from ..tasks.tiny_vit import vit_task
from ..tasks.whole_step import whole_step

OPTIONS = SwadOptions()
RELEASED = SwadOptions(released=True)


# ---- the valley: slow references that go through the evaluations one by one


def published(losses: list[float], options: SwadOptions) -> tuple[list[int], int | None]:
    """Algorithm 1 with the start searched backwards: segments that are averaged, and the evaluation of the death."""
    optimum = threshold = dead = None
    for now in range(len(losses)):
        if optimum is None:
            window = losses[now - options.n_converge + 1 : now + 1] if now + 1 >= options.n_converge else []
            if window and window[0] == min(window):
                optimum = now - options.n_converge + 1
                threshold = (1 + options.tolerance_ratio) * sum(window) / len(window)
        elif now - options.n_tolerance >= optimum and min(losses[now - options.n_tolerance + 1 : now + 1]) > threshold:
            dead = now
            break
    if optimum is None:
        return [len(losses) - 1], None
    end = len(losses) - 1 if dead is None else dead - options.n_tolerance
    while losses[end] > threshold:
        end -= 1
    start = optimum
    for _ in range(options.n_tolerance - options.n_converge):
        if start == 0 or losses[start - 1] > threshold:
            break
        start -= 1
    return list(range(start, end + 1)), dead


def released(losses: list[float], options: SwadOptions) -> tuple[list[int], int | None]:
    """The released code's two queues; what is added to the average, in its order. The first addition overwrites."""
    converging, smooth, added = deque(maxlen=options.n_converge), deque(maxlen=options.n_tolerance), []
    optimum = threshold = None
    for now in range(len(losses)):
        converging.append(now)
        smooth.append(now)
        if optimum is None:
            if len(converging) == options.n_converge and losses[converging[0]] == min(losses[k] for k in converging):
                optimum = converging[0]
                mean = sum(losses[k] for k in converging) / options.n_converge
                threshold = (1 + options.tolerance_ratio) * mean
                if options.n_tolerance > options.n_converge:
                    before, start = list(smooth)[: options.n_tolerance - options.n_converge + 1], 0
                    for place in reversed(range(len(before))):
                        if losses[before[place]] > threshold:
                            start = place + 1
                            break
                    added += before[start + 1 :]
        elif smooth[0] >= optimum:
            if min(losses[k] for k in smooth) > threshold:
                return added or [optimum], now
            added.append(smooth[0])
    if optimum is None:
        return [len(losses) - 1], None
    smooth.popleft()
    while smooth and min(losses[k] for k in smooth) <= threshold:
        added.append(smooth.popleft())
    return added or [optimum], None


CURVES = {  # losses; segments averaged; optimum; death
    "never_converges": ([9, 8, 7, 6, 5, 4, 3], range(6, 7), None, None),
    "converges_at_once": ([1.0, 1.1, 1.2, 1.1, 1.0, 1.2], range(6), 0, None),
    "alive_until_the_end": ([9, 5, 2.4, 2, 2.1, 2.2, 2.3, 2.2, 2.1], range(2, 9), 3, None),
    "dead": ([9, 5, 2.4, 2, 2.1, 2.2, 2.3, *[4] * 6, 1], range(2, 7), 3, 12),
    "bumps_within_tolerance": ([9, 5, 2, 2.1, 2.2, *[4] * 5, 2.5, 4, 2.8], range(2, 11), 2, None),
    "walks_back_three_at_most": ([2.3, 2.2, 2.1, 2.05, 2.04, 2.03, 2.02, 2.01, 2, 2.2, 2.2], range(5, 11), 8, None),
    "walks_back_to_the_last_above": ([9, 2.3, 3, 2.2, 2.1, 2.2, 2.3], range(3, 7), 4, None),
    "ends_above_the_threshold": ([9, 2, 2.1, 2.2, 4, 4, 4, 4, 4], range(1, 4), 1, None),
}


@pytest.mark.parametrize("name", CURVES)
def test_start_and_end_on_a_curve(name):
    losses, averaged, optimum, dead = CURVES[name]
    valley = LossValley.of(losses, OPTIONS)
    assert [k for k, weight in enumerate(valley.weights) if weight] == list(averaged)
    assert (valley.optimum, valley.dead) == (optimum, dead)
    assert (valley.start, valley.end) == (averaged[0], averaged[-1])
    if optimum is not None:
        assert valley.threshold == pytest.approx(1.3 * sum(losses[optimum : optimum + 3]) / 3)


@pytest.mark.parametrize(
    ("losses", "added"),
    [
        ([3, 2, 1, 2, 3, 4, 5, 6, 7, 8], [2, 3, 2, 3]),  # an optimum before six evaluations: segments come again
        ([9, 8, 7, 2.4, 2.3, 2.2, 2.1, 2, 2.1, 2.2, 4, 4, 4, 4, 4, 4], [5, 6, 7, 7, 8, 9]),  # 4 is lost, 7 is doubled
        ([9, 8, 7, 6, 5, 2, 2.1, 2.2, 2.1, 2, 2.1], [5, 6, 7, 8, 9, 10]),  # a start at the optimum: nothing is lost
        ([9, 8, 7], [2]),
    ],
)
def test_quirks_of_the_released_code(losses, added):
    weights = LossValley.of(losses, RELEASED).weights
    assert weights == [added.count(k) for k in range(len(losses))]


def random_curve(draw: random.Random) -> list[float]:
    level, losses = draw.uniform(1, 4), []
    for _ in range(draw.randint(1, 40)):
        level = max(0.0, level + draw.choice([-0.5, -0.3, -0.1, 0, 0, 0.1, 0.4]))
        losses.append(round(level, 1))
    return losses


@pytest.mark.parametrize("quirks", [False, True])
def test_any_curve_agrees_with_the_reference_and_what_is_settled_stays(quirks):
    draw, seen = random.Random(1), Counter()
    for _ in range(1500):
        losses, n_s = random_curve(draw), draw.choice([1, 2, 3, 3])
        n_e = n_s + draw.choice([0, 1, 3, 3])
        options = SwadOptions(n_s, n_e, draw.choice([0.02, 0.1, 0.3]), released=quirks)
        valley = LossValley.of(losses, options)
        added, dead = (released if quirks else published)(losses, options)
        assert valley.weights == [added.count(k) for k in range(len(losses))], (losses, options)
        assert valley.dead == dead
        for shorter in range(1, len(losses)):
            before = LossValley.of(losses[:shorter], options)
            assert before.weights[: before.settled] == valley.weights[: before.settled], (losses, options, shorter)
            assert shorter - before.settled <= n_e
        seen["dead" if dead is not None else "none" if valley.optimum is None else "alive"] += 1
    assert min(seen[kind] for kind in ("dead", "none", "alive")) > 20


@pytest.mark.parametrize("wrong", [{"n_converge": 0}, {"n_converge": 7}, {"tolerance_ratio": 0.0}])
def test_options_that_cannot_be_are_refused(wrong):
    with pytest.raises(UserError, match=rf"model\.swad\.{next(iter(wrong))}="):
        SWAD(SwadOptions(**wrong))


# ---- the average


def walk(options: SwadOptions, losses: list[float], lengths: list[int], reload_at: int | None = None):
    """A network that moves at random; returns its SWAD, the weights after each step by segment, and the network."""
    net, generator = nn.Linear(3, 2), torch.Generator().manual_seed(5)
    swad, seen = SWAD(options), []
    swad.begin(net)
    for k, (loss, steps) in enumerate(zip(losses, lengths, strict=True)):
        seen.append([])
        for step in range(steps):
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
            swad.update()
            seen[-1].append(torch.cat([p.detach().flatten() for p in net.parameters()]))
            if k == reload_at and step == 0:
                state = copy.deepcopy(swad.state_dict())
                swad = SWAD(options)
                swad.load_state_dict(state)
                swad.begin(net)
        swad.close_segment(loss)
        swad.close_segment(loss)  # an evaluation without a step in between is none
    return swad, seen, net


@pytest.mark.parametrize("name", CURVES)
def test_the_average_is_the_mean_over_all_steps_of_the_valley(name):
    losses, averaged, *_ = CURVES[name]
    lengths = [2 + k % 3 for k in range(len(losses))]
    swad, seen, net = walk(OPTIONS, losses, lengths)
    averaged = [k for k, weight in enumerate(swad.valley.weights) if weight]
    expected = torch.stack([weights for k in averaged for weights in seen[k]]).mean(0)
    swad.put_into(net)
    torch.testing.assert_close(torch.cat([p.flatten() for p in net.parameters()]), expected)
    told = swad.summary()
    assert told["start_step"] == sum(lengths[: averaged[0]]) + 1
    assert told["end_step"] == sum(lengths[: averaged[-1] + 1])


def test_the_released_average_is_over_segments():
    losses = [9, 8, 7, 2.4, 2.3, 2.2, 2.1, 2, 2.1, 2.2, 2.3]
    swad, seen, net = walk(RELEASED, losses, [2 + k % 3 for k in range(len(losses))])
    means = [torch.stack(segment).mean(0) for segment in seen]
    added, _ = released(losses, RELEASED)
    swad.put_into(net)
    expected = torch.stack([means[k] for k in added]).mean(0)
    torch.testing.assert_close(torch.cat([p.flatten() for p in net.parameters()]), expected)


@pytest.mark.parametrize("options", [OPTIONS, RELEASED])
@pytest.mark.parametrize("reload_at", [0, 4, 7])
def test_a_state_taken_up_in_the_middle_of_a_segment_gives_the_same_bits(options, reload_at):
    losses = CURVES["dead"][0]
    ends = []
    for at in (None, reload_at):
        swad, _, net = walk(options, losses, [3] * len(losses), at)
        swad.put_into(net)
        ends.append((swad.summary(), [p.detach().clone() for p in net.parameters()]))
    assert ends[0][0] == ends[1][0]
    assert all(map(torch.equal, ends[0][1], ends[1][1]))


def test_the_network_has_its_own_weights_again():
    swad, _, net = walk(OPTIONS, [3, 2, 1], [2, 2, 2])
    own = [p.detach().clone() for p in net.parameters()]
    with torch.inference_mode(), swad.applied_to(net):
        assert not torch.equal(net.weight, own[0])
    assert all(map(torch.equal, net.parameters(), own))
    net(torch.ones(1, 3)).sum().backward()  # and they can be trained


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -1.0])
def test_a_loss_without_a_valley_is_refused(loss):
    with pytest.raises(UserError, match="0 or more"):
        walk(OPTIONS, [1.0, loss], [1, 1])


# ---- in a task


class TwoSets(TinyData):
    """Tested on one set; the other one decides what is averaged."""

    def __init__(self) -> None:
        super().__init__(batch_size=6)

    def declare(self) -> dict:
        return {"classes": list("abcd"), "class_counts": COUNTS, "evaluation_sets": ["target", "source"]}

    def val_dataloader(self) -> list[DataLoader]:
        sets = [TensorDataset(self.images[:10] + 0.5, self.labels[:10]), TensorDataset(self.images, self.labels)]
        return [DataLoader(one, batch_size=6) for one in sets]


class Averaged(LongTailed):
    """A network that learns in a few steps, without BatchNorm."""

    valley_set = "source"

    def plain_net(self, data) -> nn.Module:
        layers = {"flat": nn.Flatten(), "hidden": nn.Linear(192, 16), "act": nn.ReLU(), "head": nn.Linear(16, 4)}
        return nn.Sequential(OrderedDict(layers))


class Weights(L.Callback):
    """The parameters after every step, and a checkpoint at the end of an epoch."""

    def __init__(self, path: str | None = None, epoch: int | None = None) -> None:
        self.path, self.epoch, self.seen = path, epoch, []

    def on_train_batch_end(self, trainer, task, *_) -> None:
        self.seen.append([p.detach().clone() for p in task.net.parameters()])

    def on_train_epoch_end(self, trainer, task) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)


def make_task(kind=Averaged, **arguments) -> LongTailed:
    given = {"batchformer": BatchFormerOptions(before="head" if issubclass(kind, Averaged) else None)}
    given |= {"optimizer": OptimizerOptions(lr=0.05), "swad": SwadOptions(1, 3, 0.3), **arguments}
    return kind("resnet20", **given)


def train(task, *callbacks, resume=None, **arguments):
    recorded = any(isinstance(callback, RunRecorder) for callback in callbacks)
    given = {"max_epochs": 6, "callbacks": list(callbacks), "enable_checkpointing": recorded, **arguments}
    trainer = make_trainer(**given)
    trainer.fit(task, datamodule=TwoSets(), ckpt_path=resume)
    return trainer


def accuracy(net: nn.Module, loader: DataLoader) -> float:
    right = [net(images).argmax(1) == labels for images, labels in loader]
    return 100 * torch.cat(right).double().mean().item()


@pytest.mark.parametrize("kind", [Averaged, whole_step(Averaged)])
@pytest.mark.parametrize("method", ["baseline", "batchformer"])
def test_a_run_gives_the_results_with_and_without_it(kind, method):
    recorder, weights, task = RunRecorder(), Weights(), make_task(kind, method=method)
    train(task, weights, recorder)
    valley, metrics = task.swad.valley, recorder.metrics
    assert task.swad.steps == [3, 6, 9, 12, 15, 18]
    chosen = [step for k, weight in enumerate(valley.weights) if weight for step in weights.seen[3 * k : 3 * k + 3]]
    average = task.trained_network(averaged=True).eval()
    for parameter, steps in zip(average.parameters(), zip(*chosen, strict=True), strict=True):
        torch.testing.assert_close(parameter, torch.stack(steps).mean(0))
    assert all(map(torch.equal, task.net.parameters(), weights.seen[-1]))
    if method == "baseline":  # or what follows could not tell them apart
        assert metrics["accuracy"] != metrics["accuracy_swad"]
    for prefix, loader in zip(("", "source/"), TwoSets().val_dataloader(), strict=True):
        assert metrics[f"{prefix}accuracy"] == pytest.approx(accuracy(task.net.eval(), loader))
        assert metrics[f"{prefix}accuracy_swad"] == pytest.approx(accuracy(average, loader))
    right = torch.cat([task.net(images).argmax(1) == labels for images, labels in TwoSets().val_dataloader()[0]])
    of_classes = [100 * right[torch.arange(10) % 4 == label].double().mean().item() for label in range(4)]
    assert recorder.per_class == pytest.approx(of_classes)
    assert "accuracy_swad" in [measure["key"] for measure in recorder.measures]
    assert "accuracy_swad" not in recorder.history[0]  # one more pass, at the end only
    plain = average if method == "baseline" else bf.detach(average)
    task.plain_network().load_state_dict(plain.state_dict())  # as an export does


def test_beside_a_moving_average():
    class WithBoth(Classification):
        valley_set = "source"

    task = vit_task(WithBoth, ema=0.5, swad={"n_converge": 1, "n_tolerance": 2})
    trainer = train(task, max_epochs=2)
    with task.swad.applied_to(task.net):
        averaged = accuracy(task.net.eval(), TwoSets().val_dataloader()[0])
    assert trainer.callback_metrics["val/top1_swad"].item() == pytest.approx(averaged)
    assert "val/source/top1_ema" in trainer.callback_metrics
    assert len(task.analyses) == len(set(task.analyses)) == 2
    assert task.result_entries()["swad"]["steps"] == task.swad.steps


def test_the_loss_of_a_segment_is_that_of_the_set_that_is_named():
    losses = []

    class Watch(L.Callback):
        def on_validation_end(self, trainer, task) -> None:
            batches = TwoSets().val_dataloader()[1]
            sums = [nn.functional.cross_entropy(task(images), labels, reduction="sum") for images, labels in batches]
            losses.append(sum(sums).item() / 16)

    task = make_task()
    train(task, Watch())
    assert task.swad.losses == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("arguments", [{"max_steps": 8, "max_epochs": -1}, {"max_steps": 9, "max_epochs": -1}])
def test_a_training_that_ends_by_steps_is_evaluated_too(arguments):
    recorder, task = RunRecorder(), make_task()
    trainer = train(task, recorder, **arguments)
    if recorder.validated_step != trainer.global_step:
        trainer.validate(task, datamodule=TwoSets(), verbose=False)
    assert {"accuracy_swad", "source/accuracy_swad"} <= set(recorder.metrics)
    assert task.swad.steps[-1] == trainer.global_step


@pytest.mark.parametrize("kind", [Averaged, whole_step(Averaged)])
@pytest.mark.parametrize("quirks", [False, True])
def test_a_run_stopped_while_averaging_goes_on_to_the_same_bits(tmp_path, kind, quirks):
    """Every second epoch is evaluated, and the stop is between two evaluations."""
    path, swad = str(tmp_path / "inside.ckpt"), SwadOptions(1, 3, 5.0, released=quirks)
    whole, resumed = (make_task(kind, swad=swad) for _ in range(2))
    rhythm = {"max_epochs": 8, "check_val_every_n_epoch": 2}
    unbroken = train(whole, Weights(path, epoch=4), **rhythm)
    saved = torch.load(path, weights_only=True)["task"]["swad"]
    assert whole.swad.valley.optimum < len(saved["losses"])  # the optimum was known then
    assert saved["updates"] == 3
    again = train(resumed, resume=path, **rhythm)
    assert resumed.swad.summary() == whole.swad.summary()
    averages = [task.trained_network(averaged=True) for task in (whole, resumed)]
    assert all(map(torch.equal, *(net.state_dict().values() for net in averages)))
    keys = [f"val/{prefix}accuracy{suffix}" for prefix in ("", "source/") for suffix in ("", "_swad")]
    assert all(again.callback_metrics[key] == unbroken.callback_metrics[key] for key in keys)


def test_a_checkpoint_gives_the_average_without_data(tmp_path):
    path, task = str(tmp_path / "last.ckpt"), make_task()
    train(task).save_checkpoint(path)
    restored = Averaged.load_from_checkpoint(path, weights_only=True, map_location="cpu")
    assert restored.swad.options == task.swad.options
    averages = [one.trained_network(averaged=True).state_dict() for one in (task, restored)]
    assert all(map(torch.equal, *(state.values() for state in averages)))


def test_result_and_page_tell_of_the_valley(tmp_path):
    task = make_task()
    train(task)
    told = task.result_entries()["swad"]
    assert told == task.swad.summary()
    (section,) = _sections(json.loads(json.dumps(task.sections())), tmp_path)
    assert section["series"]["x"] == told["steps"]
    marked = [loss for loss in section["series"]["lines"]["averaged"] if loss is not None]
    assert len(marked) == sum(told["weights"])


def test_statistics_of_batch_norm_that_move_are_warned_of(recwarn):
    class Moving(LongTailed):
        valley_set = "source"

    for kind, warned in ((Averaged, False), (Moving, True)):
        recwarn.clear()
        train(make_task(kind), max_epochs=1)
        assert any("Freeze BatchNorm" in str(warning.message) for warning in recwarn) == warned


def test_a_task_that_names_no_set_and_data_without_it_are_refused():
    with pytest.raises(UserError, match="LongTailed names none"):
        make_task(LongTailed)
    with pytest.raises(UserError, match="these data have: val"):
        make_task().construct(info(COUNTS))
    with pytest.raises(UserError, match="no average"):
        make_task(swad=None).trained_network(averaged=True)


@pytest.mark.gpu
def test_a_captured_step_averages_what_an_ordinary_one_does(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    ends = []
    for cuda_graph in (False, True):
        task = make_task(cuda_graph=cuda_graph, swad=SwadOptions(1, 3, 5.0))
        train(task, accelerator="cuda", devices=1)
        average = [p.detach().cpu() for p in task.trained_network(averaged=True).parameters()]
        ends.append((task.swad.steps, task.swad.valley.weights, average))
    assert ends[0][:2] == ends[1][:2]
    for eager, captured in zip(ends[0][2], ends[1][2], strict=True):
        torch.testing.assert_close(captured, eager, rtol=1e-3, atol=1e-3)
