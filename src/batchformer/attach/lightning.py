"""BatchFormer as a Lightning callback: attached during `fit`, plain checkpoints, monitored by a `StreamGuard`."""

from collections.abc import Iterable
from itertools import takewhile
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from batchformer.attach.attachment import Attachment, attach, attachment_of
from batchformer.attach.insertion import InstanceForward
from batchformer.attach.locate import get_submodule
from batchformer.attach.state_dicts import PREFIX
from batchformer.errors import UserError
from batchformer.nn import StreamGuard, TwoStreamLoss, repeat_targets

#: Where the module's own weights stand in a checkpoint, for each set of weights there. `WeightAveraging` saves the
#: average as the model's weights and those that training goes on with under the second name.
_BESIDE = {"state_dict": "batchformer", "current_model_state": "batchformer_current"}
_GUARD_KEY = "batchformer_guard"
_HOOK = "on_save_checkpoint"


class BatchFormerCallback(L.Callback):
    """Attaches at the start of `fit`, before the optimizers are created, and detaches at its end.

    Args:
        model: name of the LightningModule's attribute that holds the network; None for the LightningModule itself.
        guard: monitor the two streams in every `bf.TwoStreamLoss` that is an attribute of the LightningModule, and warn
            once if the related one stays at chance. True uses a `bf.StreamGuard` for balanced classes; for imbalanced
            classes, or a warm-up, pass your own: `bf.StreamGuard(images_per_class, warmup=500)`.
        keywords: options of `batchformer.attach`: before, dim, heads, dropout, ...

    The loss in `training_step` must see both streams: `bf.TwoStreamLoss(criterion)(logits, y)`. The network must exist
    when `fit` starts (built in `__init__`). Checkpoints contain the plain model, so they also load without the
    callback; the module's weights are stored separately and restored when `fit` resumes from such a checkpoint.
    Callbacks that average weights (`EMAWeightAveraging`) copy the model when `fit` starts: list them after this one.
    """

    def __init__(self, model: str | None = "model", *, guard: bool | StreamGuard = True, **keywords: Any) -> None:
        self.model, self.guard, self.keywords = model, guard, keywords
        self.attachment: Attachment | None = None
        self._guard_hook: StreamGuardHook | None = None
        self._plain_checkpoint: _PlainCheckpoint | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._refuse_earlier_averages(trainer)
            self.attachment = attach(self._network(pl_module), **self.keywords)
            self.attachment.modules.register_load_state_dict_post_hook(_own_weights_come_separately)
            prefix = ("" if self.model is None else f"{self.model}.") + self.attachment.prefix
            self._plain_checkpoint = _PlainCheckpoint(pl_module, prefix)
            self._plain_checkpoint.put()
            if self.guard is not False and trainer.is_global_zero:
                self._guard_hook = StreamGuardHook(
                    self.attachment, self.guard if isinstance(self.guard, StreamGuard) else None
                )
                self._guard_hook.register(part for part in pl_module.modules() if isinstance(part, TwoStreamLoss))

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._guard_hook is not None and self._guard_hook.guard is not None:
            checkpoint[_GUARD_KEY] = self._guard_hook.guard.state_dict()

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.attachment is not None and self.attachment.attached and _BESIDE["state_dict"] in checkpoint:
            assert self._plain_checkpoint is not None
            self.attachment.load_state_dict(checkpoint[_BESIDE["state_dict"]])
            self._plain_checkpoint.put_back(checkpoint)  # the callbacks that average load both sets after this one
        if self._guard_hook is not None and _GUARD_KEY in checkpoint:
            self._guard_hook.state = checkpoint[_GUARD_KEY]

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._guard_hook is not None:
            self._guard_hook.remove()
        if self._plain_checkpoint is not None:
            self._plain_checkpoint.remove()
        if self.attachment is not None and self.attachment.attached:
            self.attachment.detach()
            self._leave_averages(trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    def _network(self, pl_module: nn.Module) -> nn.Module:
        if self.model is None:
            return pl_module
        try:
            return get_submodule(pl_module, self.model)
        except UserError as error:
            raise UserError(f"{error} Name the network: BatchFormerCallback(model=...).") from None

    def _refuse_earlier_averages(self, trainer: L.Trainer) -> None:
        """They pair the parameters of their copy and of the model by order, and their copy would lack the module's."""
        for callback in takewhile(lambda callback: callback is not self, trainer.callbacks):  # type: ignore[attr-defined]
            if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
                name = type(callback).__name__
                raise UserError(
                    f"{name} stands before BatchFormerCallback and has copied the model without the module: "
                    f"swap them, callbacks=[BatchFormerCallback(...), {name}(...)]."
                )

    def _leave_averages(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """`WeightAveraging` keeps its copy after `fit`: later it saves it and swaps it with the model to validate."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        for held in (held for callback in callbacks for held in vars(callback).values()):
            if isinstance(held, AveragedModel) and isinstance(held.module, type(pl_module)):
                attachment, hook = attachment_of(self._network(held.module)), vars(held.module).get(_HOOK)
                if attachment is not None:
                    attachment.detach()
                if isinstance(hook, _PlainCheckpoint):
                    hook.remove()


class _PlainCheckpoint(InstanceForward):
    """Stands in for `on_save_checkpoint` of the LightningModule: takes the module's weights out of the model's.

    The callback's own hook would be too early, because the callbacks behind it may yet exchange the weights; and with
    `save_weights_only=True` Lightning calls no callback. The LightningModule is always called, and last.
    """

    def __init__(self, pl_module: L.LightningModule, prefix: str) -> None:
        super().__init__(pl_module, _HOOK)
        self.prefix = prefix

    def __call__(self, checkpoint: dict[str, Any]) -> None:
        if not self.removed:
            self.take_out(checkpoint)  # the LightningModule's own hook sees the plain model
        self.original(checkpoint)
        if not self.removed:
            self.take_out(checkpoint)

    def take_out(self, checkpoint: dict[str, Any]) -> None:
        for name, beside in _BESIDE.items():
            weights = checkpoint.get(name, {})
            own = [key for key in weights if key.startswith(self.prefix)]
            if own:
                checkpoint[beside] = {key.removeprefix(self.prefix): weights.pop(key) for key in own}

    def put_back(self, checkpoint: dict[str, Any]) -> None:
        for name, beside in _BESIDE.items():
            if name in checkpoint and beside in checkpoint:
                own = {self.prefix + key: value for key, value in checkpoint[beside].items()}
                checkpoint[name] = {**own, **checkpoint[name]}


def _own_weights_come_separately(module: nn.Module, incompatible: Any) -> None:
    """A plain checkpoint is complete for an attached model: what it lacks is loaded by the callback."""
    missing = incompatible.missing_keys
    missing[:] = [key for key in missing if f"{PREFIX}." not in key]


class StreamGuardHook:
    """A forward hook of `TwoStreamLoss`: the `StreamGuard` gets the cross entropy of every row, whatever the criterion.

    Class ids and soft labels are understood; of several outputs the first counts. Anything else is ignored.
    Without a guard given one is made at the first step, which shows how many classes there are.
    """

    def __init__(self, attachment: Attachment, guard: StreamGuard | None = None) -> None:
        self.attachment, self.guard = attachment, guard
        #: of the guard of the run that is resumed; taken up at the first step, on its device
        self.state: dict[str, Any] | None = None
        self._handles: list[Any] = []

    def register(self, losses: Iterable[TwoStreamLoss]) -> None:
        self._handles += [loss.register_forward_hook(self) for loss in losses]

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    @torch.no_grad()
    def __call__(self, loss: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if len(args) != 2:
            return
        logits, targets = (given[0] if isinstance(given, tuple) else given for given in args)
        if not _understood(logits, targets):
            return
        try:
            if self.attachment.related(logits) is None:
                return
        except UserError:  # rows of another model, or of several forwards
            return
        if self.guard is None:
            self.guard = StreamGuard(logits.shape[1])
        if self.state is not None:
            self.guard.load_state_dict(self.state, logits.device)
            self.state = None
        repeated = repeat_targets(targets, logits)
        self.guard.update_rows(F.cross_entropy(logits.float(), repeated, reduction="none"), self.attachment)


def _understood(logits: Any, targets: Any) -> bool:
    """Scores of two classes or more, and class ids or a distribution over the same classes."""
    if not (isinstance(logits, Tensor) and isinstance(targets, Tensor)) or logits.ndim != 2 or logits.shape[1] < 2:
        return False
    ids = targets.ndim == 1 and targets.dtype == torch.long
    return ids or (targets.ndim == 2 and targets.is_floating_point() and targets.shape[1] == logits.shape[1])
