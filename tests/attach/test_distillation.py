"""Students with a teacher: timm's distillation tasks, DeiT's loss, and both heads of DeiT's own distilled class."""

from __future__ import annotations

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from timm.task import FeatureDistillationTask, LogitDistillationTask, TokenDistillationTask
from torch import Tensor, nn

import batchformer as bf

from ..behaviour.cases import without_randomness

CLASSES, SIZE = 4, {"img_size": 32, "depth": 1, "embed_dim": 16, "num_heads": 2}
IMAGES, LABELS = torch.randn(3, 3, 32, 32), torch.tensor([0, 3, 1])


class DistilledVisionTransformer(VisionTransformer):
    """As in facebookresearch/deit (models.py), where `default_cfg` names the first head alone."""

    def __init__(self, **settings: int) -> None:
        super().__init__(num_classes=CLASSES, **settings)
        self.dist_token = nn.Parameter(torch.randn(1, 1, self.embed_dim))
        self.head_dist = nn.Linear(self.embed_dim, CLASSES)
        self.default_cfg = {"classifier": "head", "input_size": (3, 32, 32)}

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), self.dist_token.expand(len(x), -1, -1), x], dim=1)
        x = self.norm(self.blocks(x))
        x, x_dist = self.head(x[:, 0]), self.head_dist(x[:, 1])
        return (x, x_dist) if self.training else (x + x_dist) / 2


def student(kind: str = "token") -> nn.Module:
    name = "deit_tiny_distilled_patch16_224" if kind == "token" else "vit_tiny_patch16_224"
    return without_randomness(timm.create_model(name, num_classes=CLASSES, **SIZE)).train()


def teacher() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES, **SIZE).eval()


def give_both_streams(teaching: nn.Module, taught: nn.Module) -> None:
    """The snippet of docs/attach.md."""
    teaching.register_forward_hook(lambda _, args, logits: torch.cat([logits, logits]) if taught.training else logits)


TASKS = {
    "logit": lambda model, loss: LogitDistillationTask(model, teacher(), loss, temperature=2.0, verbose=False),
    "soft": lambda model, loss: TokenDistillationTask(model, teacher(), loss, temperature=2.0, verbose=False),
    "hard": lambda model, loss: TokenDistillationTask(model, teacher(), loss, distill_type="hard", verbose=False),
}


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("places", [{}, {"blocks": [0]}], ids=["before", "after"])
def test_timms_distillation_tasks_give_the_mean_of_their_loss_over_both_streams(kind: str, places: dict) -> None:
    model = student("vit" if kind == "logit" else "token")
    attachment = bf.attach(model, heads=2, dropout=0.0, **places)
    task = TASKS[kind](model, bf.TwoStreamLoss(nn.CrossEntropyLoss()))
    give_both_streams(task.teacher, model)
    found = task(IMAGES, LABELS)
    assert len(attachment.plain(found["output"])) == len(IMAGES)
    found["loss"].backward()
    assert all(parameter.grad is not None for parameter in attachment.parameters())

    outputs = model(IMAGES)
    answer = task.teacher(task.teacher.normalize_input(IMAGES, task.student_mean, task.student_std))[:3]
    losses = []
    for stream in (attachment.plain(outputs), attachment.related(outputs)):
        logits, taught = (stream, stream) if kind == "logit" else stream
        if kind == "hard":
            distilled = F.cross_entropy(taught, answer.argmax(1))
        else:
            logs = F.log_softmax(taught / 2, 1), F.log_softmax(answer / 2, 1)
            distilled = 4 * F.kl_div(*logs, reduction="batchmean", log_target=True)
        losses.append(F.cross_entropy(logits, LABELS) + distilled)
    torch.testing.assert_close(found["loss"], sum(losses) / 2)
    with torch.no_grad():
        assert len(model.eval()(IMAGES)) == len(task.teacher(IMAGES)) == len(IMAGES)  # as in timm's validation


def test_features_before_the_classifier_are_compared_as_they_are() -> None:
    model = student("vit")
    attachment = bf.attach(model, heads=2)
    task = FeatureDistillationTask(model, teacher(), bf.TwoStreamLoss(nn.CrossEntropyLoss()), verbose=False)
    found = task(IMAGES, LABELS)
    assert len(attachment.plain(found["output"])) == len(IMAGES)
    found["loss"].backward()


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_deits_distillation_loss_takes_both_heads_and_both_streams(kind: str) -> None:
    model, teaching = without_randomness(DistilledVisionTransformer(**SIZE)).train(), teacher()
    attachment = bf.attach(model, heads=2, dropout=0.0)
    assert attachment.paths == ("head", "head_dist")
    give_both_streams(teaching, model)
    base, temperature, alpha = bf.TwoStreamLoss(nn.CrossEntropyLoss()), 3.0, 0.5

    def distillation_loss(outputs: tuple[Tensor, Tensor], answer: Tensor, base: nn.Module) -> Tensor:
        """facebookresearch/deit, losses.py."""
        logits, taught = outputs
        if kind == "soft":
            logs = F.log_softmax(taught / temperature, dim=1), F.log_softmax(answer / temperature, dim=1)
            distilled = F.kl_div(*logs, reduction="sum", log_target=True) * temperature**2 / taught.numel()
        else:
            distilled = F.cross_entropy(taught, answer.argmax(dim=1))
        return base(logits, LABELS) * (1 - alpha) + distilled * alpha

    outputs = model(IMAGES)
    with torch.no_grad():
        answer = teaching(IMAGES)
    found = distillation_loss(outputs, answer, base)
    streams = attachment.plain(outputs), attachment.related(outputs)
    wanted = sum(distillation_loss(stream, answer[:3], nn.CrossEntropyLoss()) for stream in streams) / 2
    torch.testing.assert_close(found, wanted)
