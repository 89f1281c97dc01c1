"""Every variant of the mixing study through the task on a CUDA device: compiled, in one CUDA graph, in bf16.

Miniatures of the networks of the studies `mix-*` (`benchmarks/studies.py`) under their options. What one test has
compiled serves the later ones too. Alone, before a long study: `pytest tests/tasks/test_mix_on_cuda.py -m gpu`.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch._dynamo.utils import counters

from batchformer.mix import PuzzleMix
from batchformer.tasks import AdamWOptions, Classification, CosineOptions, InsertionOptions, MixOptions

from .conftest import TinyData, make_trainer

pytestmark = pytest.mark.gpu
VIT = {"backbone": "deit_tiny_patch16_224",
       "backbone_args": {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2,
                         "drop_path_rate": 0.1}}  # fmt: skip
RESNET = {"backbone": "resnet20", "label_smoothing": 0.0, "channels_last": True}
MODULE = {"method": "batchformer", "batchformer": InsertionOptions(blocks="all", group_size=2)}
STABLE = {"method": "batchformer", "batchformer": InsertionOptions(blocks="all", variant="stable", group_size=2)}
RIVALS = {"attentive-cutmix": {}, "saliencymix": {}, "puzzlemix": {"transport_size": 4}}
ON_VIT = {
    **{name: ({"method": name}, {}) for name in ("mixup-cutmix", "mixup", "transmix")},
    **{name: ({"method": name, **options}, {}) for name, options in RIVALS.items()},
    "transmix-d1": ({"method": "transmix", "block": 0}, {}),
    "transmix-rollout": ({"method": "transmix", "block": "rollout"}, {}),
    "cutmix-batchformer": ({"method": "mixup-cutmix"}, MODULE),
    "transmix-batchformer": ({"method": "transmix"}, MODULE),
    "transmix-stable": ({"method": "transmix"}, STABLE),
    "rollout-batchformer": ({"method": "transmix", "block": "rollout"}, STABLE),
}
ON_RESNET = {
    "none": {"cutmix": 0.0},
    **{name: {"method": name, **options} for name, options in {"cutmix": {}, **RIVALS}.items()},
}


class Data(TinyData):
    """With what the methods ask a data module for."""

    mean, std = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)

    def __init__(self) -> None:
        super().__init__(batch_size=4, size=16)


@pytest.fixture(scope="module", autouse=True)
def room_for_all_that_is_compiled():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=256):
        yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def extractor(tmp_path_factory):
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("extractor") / "mobilenet_v2.pth"
    torch.save(torchvision.models.mobilenet_v2(weights=None).state_dict(), file)
    return {"extractor": "mobilenet_v2", "extractor_checkpoint": str(file), "extractor_size": 64}


class Watching(Classification):
    """Notes whether the step was captured."""

    captured = False

    def on_train_epoch_end(self) -> None:
        self.captured = self._captured is not None and self._captured.captured
        super().on_train_epoch_end()


def trained(
    fast: bool, precision: str = "bf16-mixed", lr: float = 1e-3, sharpen: float = 1.0, kind=Watching, **arguments
) -> Watching:
    """Eight steps: three before the capture, the others replayed. Not fast: neither compiled nor captured."""
    task = kind(
        optimizer=AdamWOptions(lr=lr, lr_per=None),
        schedule=CosineOptions(warmup_epochs=0),
        compile=fast,
        cuda_graph=fast,
        **{"method": "baseline", **arguments},
    )
    task.construct(Data)
    with torch.no_grad():
        for name, value in task.net.named_parameters():
            if name.endswith("attn.qkv.weight") or name == "head.weight":
                value.mul_(sharpen)
    trainer = make_trainer(accelerator="cuda", devices=1, max_epochs=2, precision=precision)
    trainer.fit(task, datamodule=Data())
    assert trainer.global_step == 8
    task.loss = trainer.callback_metrics["train/loss"].item()
    return task


def check(mix: MixOptions, tolerance: float = 3e-2, **arguments) -> None:
    # Puzzle-Mix moves a block elsewhere for the last bits of a gradient, and then the picture is another: networks that
    # learn from it part for good within eight steps, though both are right. So they stand still here.
    how = {"precision": "32-true", "lr": 0.0} if mix.method == "puzzlemix" else {}
    if mix.method == "attentive-cutmix":  # bf16 may take another cell for the highest one where two are near
        how = {"precision": "32-true"}
    plain = trained(False, mix=mix, **how, **arguments)
    before = counters["stats"]["unique_graphs"]
    fast = trained(True, mix=mix, **how, **arguments)
    compiled = counters["stats"]["unique_graphs"] - before
    assert fast.captured
    assert all(torch.isfinite(value).all() for value in fast.state_dict().values())
    # one graph for the training step, one for what Puzzle-Mix or Attentive CutMix looks through; more: something is
    # compiled anew at every step
    assert compiled <= (2 if mix.method in ("puzzlemix", "attentive-cutmix") else 1)
    assert fast.loss == pytest.approx(plain.loss, rel=tolerance)


@pytest.mark.parametrize("variant", ON_VIT)
def test_vit(variant, extractor):
    options, arguments = ON_VIT[variant]
    given = extractor if options["method"] == "attentive-cutmix" else {}
    check(MixOptions(mixup=0.5, cutmix=1.0, **options, **given), **VIT, **arguments)


@pytest.mark.parametrize("variant", ON_RESNET)
def test_resnet(variant, extractor):
    options = {"mixup": 0.0, "cutmix": 1.0, **ON_RESNET[variant]}
    given = extractor if variant == "attentive-cutmix" else {}
    check(MixOptions(**options, **given), tolerance=6e-2, **RESNET)


class LooksTwice(Watching):
    """After every step: how far what Puzzle-Mix sees in the batch is from what it sees in a copy of the network."""

    def __init__(self, **arguments) -> None:
        super().__init__(**arguments)
        self.parted, self.changed = [], []

    def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        images, labels = batch[0], F.one_hot(batch[1], Data.num_classes).float()
        puzzle = next(method for method in self._mixing.mix.mixes if isinstance(method, PuzzleMix))
        seen = puzzle.saliency(images, labels)
        own, puzzle.model = puzzle.model, copy.deepcopy(puzzle.model)
        with torch.compiler.set_stance("force_eager"):
            expected = puzzle.saliency(images, labels)
        if batch_idx == 0:  # the first batch comes back after four steps
            self.before = getattr(self, "before", expected)
            self.changed.append(distance(expected, self.before))
        puzzle.model = own
        self.parted.append(distance(seen, expected))


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize("network", [VIT, RESNET])
def test_puzzle_mix_looks_through_the_weights_of_this_step(network):
    mix = MixOptions("puzzlemix", mixup=0.0, cutmix=1.0, transport_size=4)
    task = trained(True, "32-true", lr=1e-2, kind=LooksTwice, mix=mix, **network)
    assert task.captured
    assert len(task.parted) == 8
    assert all(parted < 0.05 for parted in task.parted)
    assert task.changed[-1] > 0.2  # so that old weights would be seen


@pytest.mark.parametrize("block", [None, "rollout"])
def test_targets_in_the_captured_graph_follow_the_attention_of_each_batch(block):
    """Weights with an attention far from uniform that stand still: the loss tells the targets of every step."""

    def loss(fast: bool, weight: float) -> float:
        mix = MixOptions("transmix", mixup=0.0, attention_weight=weight, block=block)
        still = {**VIT, "backbone_args": {**VIT["backbone_args"], "drop_path_rate": 0.0}, "label_smoothing": 0.0}
        return trained(fast, "32-true", lr=0.0, sharpen=20.0, mix=mix, **still).loss

    eager, captured, by_area = loss(False, 1.0), loss(True, 1.0), loss(True, 0.0)
    assert captured == pytest.approx(eager, rel=2e-3)
    assert captured != pytest.approx(by_area, rel=1e-2)
