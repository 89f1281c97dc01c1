"""BatchFormer for Lightning users, as a callback."""

from __future__ import annotations

from typing import Any

import lightning as L
from torch import nn

from batchformer.attach.attachment import Attachment, attach
from batchformer.attach.classifiers import get_submodule


class BatchFormerCallback(L.Callback):
    """Attaches at the start of `fit`, before the optimizers are made, and detaches at its end.

    Args:
        model: name of the LightningModule's attribute that holds the network; None takes the LightningModule itself.
        keywords: what `batchformer.attach` takes: before, dim, heads, dropout, ...

    The loss in `training_step` must see both streams: `bf.TwoStreamLoss(criterion)(logits, y)`. The network must exist
    when `fit` begins (built in `__init__`). A checkpoint written meanwhile holds the module's weights too, so `fit`
    with `ckpt_path=` needs the callback again.
    """

    def __init__(self, model: str | None = "model", **keywords: Any) -> None:
        self.model, self.keywords = model, keywords
        self.attachment: Attachment | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            network: nn.Module = pl_module if self.model is None else get_submodule(pl_module, self.model)
            self.attachment = attach(network, **self.keywords)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.attachment is not None and self.attachment.attached:
            self.attachment.detach()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")
