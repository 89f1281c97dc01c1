"""What every task shares whose loss is a criterion of outputs and labels: one image, one label."""

from abc import abstractmethod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

import batchformer as bf
from batchformer.data.loading.epoch_loader import images_and_labels
from batchformer.metrics import ShotAccuracy
from batchformer.training.graph_step import GraphedStep
from batchformer.training.image_task import CHECK_EVERY, ImageTask
from batchformer.training.step_count import count_step


class LabelledTask(ImageTask):
    """A network that classifies images; on a CUDA device its whole step may be one graph (`cuda_graph`).

    A subclass gives, besides what `ImageTask` asks for, the loss (`_build_criterion`, `_loss`).
    """

    criterion: nn.Module

    # ---- what a subclass gives

    @abstractmethod
    def _build_criterion(self) -> nn.Module:
        """The loss of one stream."""

    @abstractmethod
    def _loss(self, images: Float[Tensor, "batch channels height width"], targets: Any) -> Tensor:
        """The training loss over both streams; what the meter counts is counted here."""

    def _build_metric(self) -> ShotAccuracy:
        return ShotAccuracy(self.class_counts)

    def _prepare_batch(self, images: Tensor, labels: Tensor, batch_idx: int) -> tuple[Tensor, Any]:
        """What happens to a training batch before the step, outside a captured graph; images and what `_loss` takes."""
        return images, labels

    # ---- building

    def build(self, num_classes: int, class_counts: list[int]) -> None:
        super().build(num_classes, class_counts)
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            self.criterion = self._build_criterion().to(self.device)
            self.metric = self._build_metric().to(self.device)
        self.stream_criterion = bf.TwoStreamLoss(self.criterion, scale=self.stream_loss)

    # ---- training

    def on_train_start(self) -> None:
        super().on_train_start()
        if self._whole_step:
            layout = torch.channels_last if self.channels_last else torch.preserve_format
            self._graphed = GraphedStep(self._train_on, memory_format=layout)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        images, targets = self._prepare_batch(*images_and_labels(batch), batch_idx)
        if self._whole_step:
            assert self._graphed is not None
            self._graphed(images, targets)
            count_step(self.trainer)
            return None
        loss = self._loss(images, targets)
        if not loss.is_cuda or (batch_idx + 1) % CHECK_EVERY == 0:
            self._raise_if_not_finite()
        return loss

    def _train_on(self, images: Tensor, targets: Any) -> tuple[Tensor, ...]:
        """Forward, backward and update, as Lightning's automatic optimisation does them, without a synchronisation."""
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, torch.optim.Optimizer)
        optimizer.zero_grad(set_to_none=True)
        loss = self._loss(images, targets)
        # Lightning's autocast surrounds this method; outside a graph the backward pass runs without it
        with torch.autocast(images.device.type, enabled=False):
            loss.backward()
        optimizer.step()
        self._after_step()
        return (loss.detach(),)
