"""BatchFormer for Lightning users, as a callback."""

from __future__ import annotations

from typing import Any

import lightning as L
from torch import nn

from batchformer.attach.attachment import Attachment, attach
from batchformer.attach.classifiers import get_submodule
from batchformer.attach.watched_loss import WatchedLoss
from batchformer.nn import StreamGuard, TwoStreamLoss

_CHECKPOINT_KEY = "batchformer"
_GUARD_KEY = "batchformer_guard"


class BatchFormerCallback(L.Callback):
    """Attaches at the start of `fit`, before the optimizers are made, and detaches at its end.

    Args:
        model: name of the LightningModule's attribute that holds the network; None takes the LightningModule itself.
        guard: watch the two streams in every `bf.TwoStreamLoss` that is an attribute of the LightningModule, and warn
            once when the related one stays at chance. True takes a `bf.StreamGuard` for classes that are equally
            frequent; for others, or with a warm-up, give one: `bf.StreamGuard(images_per_class, warmup=500)`.
        keywords: what `batchformer.attach` takes: before, dim, heads, dropout, ...

    The loss in `training_step` must see both streams: `bf.TwoStreamLoss(criterion)(logits, y)`. The network must exist
    when `fit` begins (built in `__init__`). Checkpoints hold the plain model, so they load without the callback too;
    the module's own weights stand beside it and come back when `fit` goes on from such a checkpoint.
    """

    def __init__(
        self,
        model: str | None = "model",
        *,
        guard: bool | StreamGuard = True,
        **keywords: Any,
    ) -> None:
        self.model, self.guard, self.keywords = model, guard, keywords
        self.attachment: Attachment | None = None
        self._watched: WatchedLoss | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            network: nn.Module = pl_module if self.model is None else get_submodule(pl_module, self.model)
            self.attachment = attach(network, **self.keywords)
            self.attachment.modules.register_load_state_dict_post_hook(_own_weights_come_separately)
            if self.guard is not False and trainer.is_global_zero:
                self._watched = WatchedLoss(
                    self.attachment, self.guard if isinstance(self.guard, StreamGuard) else None
                )
                self._watched.watch(part for part in pl_module.modules() if isinstance(part, TwoStreamLoss))

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.attachment is not None and self.attachment.attached:
            prefix = ("" if self.model is None else f"{self.model}.") + self.attachment.prefix
            weights = checkpoint["state_dict"]
            own = [key for key in weights if key.startswith(prefix)]
            checkpoint[_CHECKPOINT_KEY] = {key.removeprefix(prefix): weights.pop(key) for key in own}
        if self._watched is not None and self._watched.guard is not None:
            checkpoint[_GUARD_KEY] = self._watched.guard.state_dict()

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.attachment is not None and self.attachment.attached and _CHECKPOINT_KEY in checkpoint:
            self.attachment.load_state_dict(checkpoint[_CHECKPOINT_KEY])
        if self._watched is not None and _GUARD_KEY in checkpoint:
            self._watched.go_on_from(checkpoint[_GUARD_KEY])

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._watched is not None:
            self._watched.leave()
        if self.attachment is not None and self.attachment.attached:
            self.attachment.detach()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")


def _own_weights_come_separately(module: nn.Module, incompatible: Any) -> None:
    """A plain checkpoint is complete for an attached model: what it lacks is loaded by the callback."""
    missing = incompatible.missing_keys
    missing[:] = [key for key in missing if f"{_CHECKPOINT_KEY}." not in key]
