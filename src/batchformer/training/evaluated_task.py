"""How a network that classifies images is evaluated: the plain one, its accuracies in percent."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from batchformer.data.loading.epoch_loader import images_and_labels
from batchformer.metrics import ShotAccuracy


class EvaluatedTask(L.LightningModule):
    """Validation, test and prediction; `net` and `metric` come with the task."""

    #: what of `metric_names` the progress line shows
    shown_metrics: tuple[str, ...] = ("all", "few")

    net: nn.Module
    metric: ShotAccuracy
    channels_last: bool
    compile_net: bool
    per_class_accuracy: list[float]

    def before_build(self, data: Any, resumes: bool) -> None:
        """Called by a run that has read its data, before the network is made and anything is written.

        `resumes`: all weights come from a checkpoint, files of others need not be there any more.
        """

    @property
    def metric_names(self) -> tuple[str, ...]:
        """What validation logs (as val/NAME) and result.json holds."""
        return ("all", "many", "medium", "few")

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "rows classes"]:
        # one layout whatever mixed the batch: for another one the compiler would start anew, in a capture maybe
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return self.net(images.contiguous(memory_format=layout))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def on_validation_epoch_end(self) -> None:
        self._log_accuracies("val")

    def on_test_epoch_end(self) -> None:
        self._log_accuracies("test")

    def predict_step(self, batch: Any, batch_idx: int) -> Float[Tensor, "batch classes"]:
        images = batch if isinstance(batch, Tensor) else images_and_labels(batch)[0]
        return self._test_logits(images).softmax(1)

    def _evaluate(self, batch: Any, stage: str) -> None:
        images, labels = images_and_labels(batch)
        logits = self._test_logits(images)
        self.metric.update(logits, labels)
        loss = F.cross_entropy(logits, labels)
        self.log(f"{stage}/loss", loss, on_epoch=True, batch_size=len(labels), sync_dist=self.trainer.world_size > 1)

    def _test_logits(self, images: Tensor) -> Float[Tensor, "batch classes"]:
        """Logits of the plain network, nothing added."""
        with torch.compiler.set_stance("force_eager" if self.compile_net else "default"):
            return self(images).float()

    def _log_accuracies(self, stage: str) -> None:
        values = self.metric.compute()
        self.per_class_accuracy = values.pop("per_class").tolist()
        self._log_metrics(stage, values)
        self.metric.reset()

    def _log_metrics(self, stage: str, values: dict[str, Tensor]) -> None:
        # every process has the sums of all already; the mean over them changes nothing
        logged = {f"{stage}/{name}": value.float() for name, value in values.items()}
        self.log_dict(logged, sync_dist=self.trainer.world_size > 1)
