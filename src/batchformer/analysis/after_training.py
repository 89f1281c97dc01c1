"""Analyses of a run right after training, by the names that tasks list in `analyses`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchformer.data.loading.epoch_loader import as_batch

HEALTH_IMAGES = 128


def gradient_influence_of(task: Any, data: Any, trainer: Any) -> dict[str, Any]:
    """The paper's Fig. 6 for this run: the gradient of each class's loss at the other images of its batch."""
    from batchformer.analysis import gradient_influence

    if task.attachment is None:
        return {}
    device, loaders = trainer.strategy.root_device, data.val_dataloader()
    task.net.to(device)
    task.net.float()  # of a run in 16 or 64 bits (precision bf16-true) too: training is over, and features are float32
    with _attending_alone(task.attachment):
        per_class = gradient_influence(
            task.net,
            task.attachment,
            loaders[0] if isinstance(loaders, list) else loaders,
            data.num_classes,
            device,
            wrt="features",
        )
    return {"gradient_influence": {"wrt": "features", "per_class": [float(value) for value in per_class]}}


def stream_health_of(task: Any, data: Any, trainer: Any) -> dict[str, Any]:
    """`stream_health` of one training batch, not mixed, in the precision of the run."""
    from batchformer.analysis import stream_health

    if task.attachment is None:
        return {}
    device = trainer.strategy.root_device
    task.net.to(device)
    batch = as_batch(next(iter(data.train_dataloader())))
    images, labels = (batch[name][:HEALTH_IMAGES].to(device) for name in ("images", "labels"))
    precision = trainer.strategy.precision_plugin
    with _attending_alone(task.attachment), precision.forward_context():
        found = stream_health(task.net, precision.convert_input(images), labels, samples=4)
    return {"stream_health": found.as_dict()}


def mistakes_of(task: Any, data: Any, trainer: Any) -> dict[str, Any]:
    """Pictures of what the task confuses most, in the folder `mistakes` of the run; no entry of result.json."""
    from batchformer.analysis.mistakes import write_mistakes

    write_mistakes(Path(trainer.default_root_dir) / "mistakes", task.mistakes(data))
    return {}


@contextmanager
def _attending_alone(attachment: Any) -> Iterator[None]:
    """Attend over this process alone: only one process measures, and with scope="global" it would deadlock."""
    scopes = {point.module: point.module.scope for point in attachment.points}
    try:
        for module in scopes:
            module.scope = "local"
        yield
    finally:
        for module, scope in scopes.items():
            module.scope = scope


#: name -> analysis(task, data, trainer) that returns entries of result.json
ANALYSES = {"gradient_influence": gradient_influence_of, "stream_health": stream_health_of, "mistakes": mistakes_of}
