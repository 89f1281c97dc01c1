"""What is measured of the module at the end of a run, and put into result.json."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as L

from batchformer.data.loading.epoch_loader import images_and_labels
from batchformer.errors import UserError

HEALTH_IMAGES = 128


def analyse(task: Any, data: Any, trainer: L.Trainer) -> dict[str, Any]:
    """`gradient_influence` of a module before the classifier, `stream_health` of modules inside; {} of a baseline.

    Of a detector neither: the loss of each of its streams is in the history of the run. What cannot be measured is
    told and left out: the run it would be added to is whole without it.
    """
    if task.attachment is None or not hasattr(task, "criterion"):
        return {}
    task.net.to(trainer.strategy.root_device)
    try:
        with _attending_alone(task.attachment):
            if task.before_classifier:
                return {"gradient_influence": _gradient_influence(task, data, trainer)}
            return {"stream_health": _stream_health(task, data, trainer)}
    except UserError as obstacle:
        warnings.warn(f"the module is not looked at after this run: {obstacle}", UserWarning, stacklevel=1)
        return {}


@contextmanager
def _attending_alone(attachment: Any) -> Iterator[None]:
    """One process measures, the others have gone on: with scope="global" it would wait for them for ever."""
    scopes = {point.module: point.module.scope for point in attachment.points}
    try:
        for module in scopes:
            module.scope = "local"
        yield
    finally:
        for module, scope in scopes.items():
            module.scope = scope


def _gradient_influence(task: Any, data: Any, trainer: L.Trainer) -> dict[str, Any]:
    """The paper's Fig. 6 for this run: how much each class's loss moves the other images of its batch."""
    from batchformer.analysis import gradient_influence

    device = trainer.strategy.root_device
    task.net.float()  # of a run in 16 or 64 bits (precision bf16-true) too: training is over, and features are float32
    per_class = gradient_influence(
        task.net, task.attachment, data.val_dataloader(), data.num_classes, device, wrt="features"
    )
    return {"wrt": "features", "per_class": [float(value) for value in per_class]}


def _stream_health(task: Any, data: Any, trainer: L.Trainer) -> dict[str, Any]:
    """Of one training batch, not mixed, in the precision of the run: is the related stream alive, does it relate?"""
    from batchformer.analysis import stream_health

    device = trainer.strategy.root_device
    batch = images_and_labels(next(iter(data.train_dataloader())))
    images, labels = (tensor[:HEALTH_IMAGES].to(device) for tensor in batch)
    precision = trainer.strategy.precision_plugin
    with precision.forward_context():
        return stream_health(task.net, precision.convert_input(images), labels, samples=4).as_dict()
