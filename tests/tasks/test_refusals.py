"""Options of tasks that cannot be are refused in a sentence, and the last ones that can be are taken."""

from __future__ import annotations

import math
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from batchformer.errors import UserError
from batchformer.tasks import MAE, TASKS, CompositionalZeroShot, HandMesh, JudgeOptions, LinearProbe, Panoptic
from batchformer.tasks.detection.task import DetectorOptimizerOptions
from batchformer.tasks.domains.options import DomainOptimizerOptions
from batchformer.tasks.hands.task import AdamOptions as HandOptimizerOptions
from batchformer.tasks.long_tailed.balms import BalmsOptions
from batchformer.tasks.long_tailed.paco import PacoOptions
from batchformer.tasks.self_supervised.probe import ProbeOptimizerOptions
from batchformer.tasks.zero_shot import generalized_options as generalized
from batchformer.tasks.zero_shot.compositional_options import PairOptimizerOptions
from batchformer.training.averaging import SWAD, SwadOptions
from batchformer.training.optimizers import AdamWOptions, OptimizerOptions
from batchformer.training.schedules import CosineOptions, ScheduleOptions

from .conftest import COUNTS, info
from .test_mae import DECODER, SMALL

RATES = ("lr", "backbone_lr", "weight_decay", "module_lr_factor", "module_weight_decay", "backbone_lr_factor", "gamma")
OPTIMIZERS = (OptimizerOptions, AdamWOptions, ProbeOptimizerOptions, HandOptimizerOptions, DomainOptimizerOptions,
              PairOptimizerOptions, generalized.AdamOptions, DetectorOptimizerOptions)  # fmt: skip
LEAST: dict[type, dict[float, tuple[str, ...]]] = {
    ScheduleOptions: {0: ("warmup_epochs",)},
    CosineOptions: {0: ("warmup_epochs", "warmup_lr", "min_lr")},
    BalmsOptions: {0: ("lr", "init_pow"), 1: ("meta_batch", "meta_per_class")},
    PacoOptions: {0: ("momentum",), 1: ("dim", "queue")},
    generalized.GeneratorOptions: {0: ("penalty", "classification_weight"),
                                   1: ("noise_dim", "width", "critic_width", "critic_steps")},
    generalized.ContrastOptions: {0: ("instance_weight", "class_weight"),
                                  1: ("embedding_dim", "projection_dim", "comparator_width"),
                                  1e-6: ("instance_temperature", "class_temperature")},
    generalized.SoftmaxOptions: {0: ("lr",), 1: ("synthetic", "epochs", "batch_size")},
    generalized.LinearMapOptions: {1e-9: ("ridge", "attribute_ridge")},
    generalized.AdamOptions: {0: ("decay",), 1: ("decay_epochs",)},
}  # fmt: skip


def of(kind: type, name: str, value: Any) -> None:
    kind(**{name: value}).check()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", LEAST, ids=lambda kind: kind.__name__)
def test_numbers_of_options_have_a_least_value(kind):
    for least, names in LEAST[kind].items():
        for name in names:
            of(kind, name, least)
            with pytest.raises(UserError, match=name):
                of(kind, name, least - 1)


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_optimizers_take_no_negative_rates_and_betas_below_one(kind):
    given = {field.name for field in fields(kind)}
    for name in given & {*RATES}:
        of(kind, name, 1e-3)
        with pytest.raises(UserError, match=name):
            of(kind, name, -1e-3)
    if "betas" in given:
        of(kind, "betas", (0.0, 0.0))
        for betas in ((1.0, 0.9), (0.9, 1.0), (-0.1, 0.9)):
            with pytest.raises(UserError, match="betas"):
                of(kind, "betas", betas)


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_made_again_from_what_it_saves(name):
    task = TASKS[name](seed=7)
    again = type(task)(**task.hparams)
    assert again.seed == 7
    assert again.hparams == task.hparams
    options = {key: value for key, value in vars(task).items() if key.endswith("options")}
    assert {key: value for key, value in vars(again).items() if key in options} == options


@pytest.mark.parametrize("threshold", [-0.01, 1.0])
def test_a_threshold_of_segments_is_a_probability_below_one(threshold):
    assert Panoptic(threshold=0.0).threshold == 0.0
    with pytest.raises(UserError, match=f"threshold={threshold} must be from 0 to below 1"):
        Panoptic(threshold=threshold)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"neighbours": -1}, "neighbours=-1 must be 0 or more"),
        ({"temperature": 0.0}, "temperature=0.0 above 0"),
        ({"images": 0}, "images=0 1 or more, or null"),
        ({"neighbours": 0, "linear": False}, "evaluates nothing"),
    ],
)
def test_features_are_judged_by_something(given, said):
    for last in ({"neighbours": 0}, {"linear": False}, {"images": 1}, {"images": None}):
        JudgeOptions(**last).check()
    with pytest.raises(UserError, match=said):
        JudgeOptions(**given).check()


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ({"decoder_blocks": []}, "has no place"),
        ({"encoder_blocks": [0], "share": True}, "share needs places of one width"),
    ],
)
def test_the_module_of_an_autoencoder_has_places_of_one_width_where_it_is_shared(module, said):
    def build(**batchformer):
        task = MAE("vit_tiny_patch16_224", SMALL, decoder=DECODER, batchformer={"heads": 2, **batchformer})
        task.construct(info(COUNTS))

    for last in ({"decoder_blocks": [], "encoder_blocks": [1]}, {"encoder_blocks": [0]}, {"share": True}):
        build(**last)
    with pytest.raises(UserError, match=said):
        build(**module)


@pytest.mark.parametrize("labels", [0.0, 1.01])
def test_a_probe_uses_some_of_the_labels(labels):
    assert LinearProbe("resnet20", labels=1.0).labels == 1.0
    with pytest.raises(UserError, match="above 0, at most 1"):
        LinearProbe("resnet20", labels=labels)


def test_a_probe_has_one_linear_classifier():
    with pytest.raises(UserError, match="one linear classifier; levit_128s has none"):
        LinearProbe("levit_128s").construct(info(COUNTS))
    probe = LinearProbe("resnet20", {"widths": [4, 8, 8]}, batch_norm=True)
    with pytest.raises(UserError, match="a BatchNorm in its classifier"):
        probe.export_notes()


@pytest.mark.parametrize("given", [{"n_converge": 0}, {"n_converge": 7, "n_tolerance": 6}, {"tolerance_ratio": 0.0},
                                   {"tolerance_ratio": math.inf}])  # fmt: skip
def test_the_valley_of_an_average_has_a_begin_before_its_end(given):
    for last in ({"n_converge": 1}, {"n_converge": 6, "n_tolerance": 6}):
        SWAD(SwadOptions(**last))
    with pytest.raises(UserError, match=r"model\.swad"):
        SWAD(SwadOptions(**given))


def test_hands_need_a_mesh():
    with pytest.raises(UserError, match="data with a mesh: hands-rendered, or FreiHAND"):
        HandMesh("resnet10t").construct(info(COUNTS))


@pytest.mark.parametrize(("schedule", "end", "refused"), [("cosine", -1, True), ("cosine", 3, False),
                                                          ("constant", -1, False)])  # fmt: skip
def test_a_cosine_needs_the_end_of_the_training_and_a_constant_does_not(schedule, end, refused):
    task = CompositionalZeroShot(optimizer={"schedule": schedule})
    task._trainer = SimpleNamespace(max_epochs=end, max_steps=-1, world_size=1, num_training_batches=math.inf)
    if refused:
        with pytest.raises(UserError, match=r"model\.optimizer\.schedule to constant"):
            task.check_trainer()
    else:
        task.check_trainer()
