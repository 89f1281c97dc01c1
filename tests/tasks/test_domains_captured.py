"""The captured step of the domain tasks: on the CPU uncaptured against the ordinary one; on a CUDA device captured."""

import pytest
import torch

from batchformer.data import DigitsDomains
from batchformer.tasks import DomainAdaptation, DomainGeneralization

from .conftest import make_trainer
from .whole_step import whole_step

CASES = {  # the penalty's weight and the optimizer change at step 4, which a captured step must follow
    "coral": {"algorithm": {"name": "coral"}},
    "irm": {"algorithm": {"name": "irm", "anneal_steps": 4, "weight": 0.5}},
    "vrex": {"algorithm": {"name": "vrex", "anneal_steps": 4}, "swad": {"n_converge": 1}},
    "mixstyle": {"algorithm": {"name": "mixstyle", "layers": ["layer1"]}},
    "dann": {"adapt": {"name": "dann", "bottleneck_dim": 8, "reversal_steps": 2}},
    "mdd": {"adapt": {"name": "mdd", "bottleneck_dim": 8, "reversal_steps": 2}},
}
FAST = {"optimizer": {"name": "sgd", "lr": 0.002, "schedule": "cosine"}}


def fit(name, kind=None, **arguments):
    """Weights, number of steps and metrics after three epochs of three steps."""
    adapts = "adapt" in CASES[name]
    kind = kind or (DomainAdaptation if adapts else DomainGeneralization)
    given = {
        "backbone": "resnet20",
        "backbone_args": {"widths": [8, 8]},
        "freeze_batch_norm": True,
        **FAST,
        **CASES[name],
    }
    task = kind(**given, **{key: value for key, value in arguments.items() if key == "cuda_graph"})
    sources = {"sources": ["0-degrees"], "adapt": True} if adapts else {"sources": ["0-degrees", "15-degrees"]}
    data = DigitsDomains(target="75-degrees", steps_per_epoch=3, batch_size=8, augment="none", **sources)
    trainer = make_trainer(**{"max_epochs": 3, **{k: v for k, v in arguments.items() if k != "cuda_graph"}})
    trainer.fit(task, datamodule=data)
    metrics = {key: value.item() for key, value in trainer.callback_metrics.items()}
    return {key: value.cpu() for key, value in task.net.state_dict().items()}, trainer.global_step, metrics


@pytest.mark.parametrize("name", ["irm", "vrex", "mdd"])
def test_the_whole_step_ends_with_the_bits_of_the_ordinary_one(name):
    whole = whole_step(DomainAdaptation if "adapt" in CASES[name] else DomainGeneralization)
    ordinary, captured = fit(name), fit(name, whole)
    assert captured[1] == ordinary[1] == 9
    assert captured[2] == ordinary[2]
    assert all(torch.equal(captured[0][key], value) for key, value in ordinary[0].items())


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_captured_on_a_gpu_it_trains_as_an_ordinary_step_does(name, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    plain, graphed = (fit(name, accelerator="cuda", devices=1, cuda_graph=on) for on in (False, True))
    assert graphed[1] == plain[1] == 9
    assert graphed[2]["train/loss"] == pytest.approx(plain[2]["train/loss"], rel=5e-3)
    for key, value in plain[0].items():
        torch.testing.assert_close(graphed[0][key], value, rtol=5e-3, atol=5e-3)
