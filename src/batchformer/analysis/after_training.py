"""Analyses of a run right after training, by the names that tasks list in `analyses`."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from batchformer.attach.contexts import temporary_attributes
from batchformer.data.loading.epoch_loader import as_batch

if TYPE_CHECKING:
    from torch import Tensor

HEALTH_IMAGES = 128
PLANE_IMAGES = 60  # of each domain


def gradient_influence_of(task: Any, data: Any, trainer: Any) -> dict[str, Any]:
    """The paper's Fig. 6 for this run: the gradient of each class's loss at the other images of its batch."""
    from batchformer.analysis import gradient_influence

    if task.attachment is None:
        return {}
    device, loaders = trainer.strategy.root_device, data.val_dataloader()
    task.net.to(device)
    task.net.float()  # of a run in 16 or 64 bits (precision bf16-true) too: training is over, and features are float32
    with attend_locally(task.attachment):
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
    with attend_locally(task.attachment), precision.forward_context():
        found = stream_health(task.net, precision.convert_input(images), labels, samples=4)
    return {"stream_health": found.as_dict()}


def domain_planes_of(task: Any, data: Any, trainer: Any) -> dict[str, Any]:
    """Sections of the page: features of the target and of the source domains' held-out images on one plane.

    Those of the plain network, which is what is tested; with a module also what leaves it when all these images are one
    batch. `task.feature_layer` names the submodule that the features enter.
    """
    import torch

    from batchformer.analysis.recorded_forward import record_inference

    device, precision = trainer.strategy.root_device, trainer.strategy.precision_plugin
    task.net.to(device).eval()
    loaders = [data.evaluation_loader(name) for name in ("source", "target")]
    parts = [evenly_spaced_samples(loader, PLANE_IMAGES, "images")["images"] for loader in loaders]
    rows = {name: len(images) for name, images in zip(("source", str(data.target)), parts, strict=True)}
    images, entered = precision.convert_input(torch.cat(parts).to(device)), []
    layer = task.net.get_submodule(task.feature_layer)
    with torch.no_grad(), precision.forward_context():
        with layer.register_forward_pre_hook(lambda _, args: entered.append(args[0])):
            task.net(images)
        found = {"Features of two domains": entered[0]}
        if task.attachment is not None:
            with attend_locally(task.attachment):
                related = record_inference(task.net, images).related
            found["Features of two domains, after the module"] = related.mean(1)
    return {"sections": [_plane(title, features.float().cpu(), rows) for title, features in found.items()]}


def evenly_spaced_samples(loader: Iterable[Any], count: int, *names: str) -> "dict[str, Tensor]":
    """Entries of `count` samples of a set, or of all if it has fewer, on the CPU.

    Evenly spaced over the order of the set, since files are often sorted by class.
    """
    import torch

    kept: dict[str, Tensor] = {}
    seen, stride = 0, 1
    for batch in loader:
        taken = {name: as_batch(batch)[name][-seen % stride :: stride].cpu() for name in names}
        seen += len(as_batch(batch)[names[0]])
        kept = {name: torch.cat([kept[name], rows]) if kept else rows for name, rows in taken.items()}
        while len(kept[names[0]]) >= 2 * count:  # the length of the set is known at its end only
            kept, stride = {name: rows[::2] for name, rows in kept.items()}, 2 * stride
    held = len(kept[names[0]])
    chosen = torch.arange(min(count, held)) * held // min(count, held)
    return {name: rows[chosen] for name, rows in kept.items()}


def _plane(title: str, features: "Tensor", rows: dict[str, int]) -> dict[str, Any]:
    """A section with the first two principal components of the features, whose rows are grouped by domain."""
    from batchformer.analysis.features import principal_components

    centred = features - features.mean(0)
    whole = float(centred.square().sum())
    flat = principal_components(features, 2)
    groups, between, first = {}, 0.0, 0
    for name, count in rows.items():
        part = slice(first, first + count)
        groups[name] = [[round(value, 3) for value in point] for point in flat[part].tolist()]
        between += count * float(centred[part].mean(0).square().sum())
        first += count
    shown, explained = (100 * part / whole if whole else 0.0 for part in (float(flat.square().sum()), between))
    text = (
        f"The plane holds {shown:.0f} % of the variance of the features; the domain explains {explained:.1f} % of it."
    )
    points = {"groups": groups, "xlabel": "first principal component", "ylabel": "second"}
    return {"title": title, "text": text, "points": points}


def attend_locally(attachment: Any) -> AbstractContextManager[None]:
    """Attend over this process alone: only one process measures, and with scope="global" it would deadlock."""
    return temporary_attributes({point.module: {"scope": "local"} for point in attachment.points})


def _imported(module: str, name: str) -> Callable[..., dict[str, Any]]:
    """An analysis of another file, which is imported when it runs: few runs need all that these import."""

    def analysis(*run: Any, **options: Any) -> dict[str, Any]:
        return getattr(import_module(f"batchformer.analysis.{module}"), name)(*run, **options)

    return analysis


#: name -> analysis(task, data, trainer) that returns entries of result.json
ANALYSES: dict[str, Callable[..., dict[str, Any]]] = {
    "gradient_influence": gradient_influence_of,
    "grad_cam": _imported("rare_images", "grad_cam_of"),
    "stream_health": stream_health_of,
    "domain_planes": domain_planes_of,
    "mistakes": _imported("failures", "mistakes_of"),
    "class_failures": _imported("failures", "class_failures"),
    "box_failures": _imported("failures", "box_failures"),
    "neighbours": _imported("pretraining_pictures", "neighbours_of"),
    "reconstructions": _imported("pretraining_pictures", "reconstructions_of"),
    "hand_meshes": _imported("hand_pictures", "hand_meshes_of"),
}


def failures(task: Any, data: Any, trainer: Any) -> dict[str, Any]:
    """What the analyses of failures of this task find, without pictures: for an evaluation that writes nothing."""
    found: dict[str, Any] = {}
    for name in (each for each in task.analyses if each in ("class_failures", "box_failures")):
        found |= ANALYSES[name](task, data, trainer, pictures=False)
    return found
