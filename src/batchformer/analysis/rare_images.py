"""Grad-CAM on test images of rare classes (BatchFormer, Fig. 5; appendix, Figs. 1 to 4), chosen by a rule and a seed.

The paper shows "low-shot test images" that somebody selected. The released code explains the true class by what leaves
`layer3`, for classes of ten training images or more. Here the images are drawn among the classes with few training
images, so that they are not selected by their looks.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor, nn

from batchformer.analysis.drawing import to_pictures, write_index
from batchformer.analysis.grad_cam import grad_cam
from batchformer.analysis.pictures import MOST_SHOWN, draw_grad_cam
from batchformer.attach.contexts import untouched
from batchformer.attach.probe import first_tensor
from batchformer.data.loading.order import generator
from batchformer.errors import UserError, did_you_mean
from batchformer.metrics.measures import shot_of
from batchformer.models.ride import ExpertNetwork, RoutedExperts

FOLDER = "grad_cam"  # of the picture in a run folder
_EXPERTS = "experts."  # prefix of the layers of each, in an `ExpertNetwork`
TITLE = "Evidence for the true class (Grad-CAM)"
RULE = (
    "Test images of {classes}, drawn by seed {seed}, with their classes. Below each map: the predicted class, orange "
    "if wrong. Bright: evidence for the true class at {layer}; each image has its own scale."
)


def rare_images(
    class_counts: Sequence[int], labels: Int[np.ndarray, " images"], count: int = MOST_SHOWN, seed: int = 0
) -> Int[np.ndarray, " shown"]:
    """Numbers of `count` images of rare classes in a test set with these labels; the most frequent class first.

    The classes with fewer than 20 training images; where there are fewer of them than `count`, the `count` rarest.
    Which of them, and which of their images, is drawn by the seed; a class has a second image only where there are
    fewer classes than images wanted.
    """
    tested = sorted(set(labels.tolist()), key=lambda c: (class_counts[c], c))
    few = [c for c in tested if shot_of(class_counts[c]) == "few"]
    candidates = few if len(few) >= count else tested[:count]
    random = generator(seed, "rare images")
    chosen = sorted(random.permutation(candidates)[:count].tolist(), key=lambda c: (-class_counts[c], c))
    shuffled = [random.permutation(np.flatnonzero(labels == c)) for c in chosen]
    turns = [[members[turn] for members in shuffled if turn < len(members)] for turn in range(count)]
    wanted = [index for turn in turns for index in turn][:count]
    return np.array(sorted(wanted, key=lambda index: (-class_counts[int(labels[index])], labels[index], index)))


@dataclass
class Explained:
    """Grad-CAM maps of images, their predicted classes and their true ones."""

    pictures: list[Image.Image]
    classes: list[str]
    predicted: list[str]
    maps: Float[Tensor, "images row column"]
    layer: str


class _LogitsModel(nn.Module):
    """A task as a model: images in, the logits that are evaluated out."""

    def __init__(self, task: Any) -> None:
        super().__init__()
        self.task = task

    def forward(self, images: Tensor) -> Tensor:
        return self.task.test_logits(images)


def explain(task: Any, data: Any, chosen: Int[np.ndarray, " images"], layer: str | None = None) -> Explained:
    """Grad-CAM for the true classes of these images of the first evaluation set; on the device of the task."""
    batch = data.evaluation_loader(data.evaluation_sets[0]).batch_of(chosen)
    images, labels = batch["images"].to(task.device), batch["labels"].to(task.device)
    if layer is not None and layer not in (known := dict(task.net.named_modules())):
        raise UserError(
            f"--layer {layer}: {type(task.net).__name__} has no such submodule.{did_you_mean(layer, known)}"
        )
    names = [str(name) for name in task.data_info.classes]
    maps, shown = _maps(task, images, labels, layer)
    model = _LogitsModel(task)
    with untouched(model), torch.no_grad():
        model.eval()
        predicted = model(images).argmax(1).tolist()
    classes = [names[label] for label in labels.tolist()]
    return Explained(
        to_pictures(images, data.mean, data.std), classes, [names[label] for label in predicted], maps, shown
    )


def explain_classes(
    task: Any, images: Tensor, answers: Int[Tensor, " images"]
) -> tuple[Float[Tensor, "images row column"], str]:
    """Grad-CAM for these classes, and the layer it is taken at; on the device and in the precision of the network."""
    images = images.to(task.device, next(task.net.parameters()).dtype)
    return _maps(task, images, answers)


def _maps(
    task: Any, images: Tensor, classes: Int[Tensor, " images"], layer: str | None = None
) -> tuple[Float[Tensor, "images row column"], str]:
    """Grad-CAM for these classes, and where it is taken, in words."""
    model, words = _LogitsModel(task), layer or usual_layer(task.net, images)
    if layer is not None or not isinstance(task.net, ExpertNetwork) or not words.startswith(_EXPERTS):
        return grad_cam(model, images, f"task.net.{words}", classes), words
    inside = words.split(".", 2)[2]
    paths = [f"task.net.{_EXPERTS}{k}.{inside}" for k in range(len(task.net.experts))]  # their mean is evaluated
    size = 1 if isinstance(task.net, RoutedExperts) else len(images)  # images pass through different numbers of experts
    parts = zip(images.split(size), classes.split(size), strict=True)
    return torch.cat([grad_cam(model, some, paths, theirs) for some, theirs in parts]), f"{inside} of the experts"


def usual_layer(net: nn.Module, images: Tensor) -> str:
    """The layer: `layer3` of a ResNet as released, `norm1` of a ViT's last block, else the last feature map."""
    seen: dict[str, Tensor] = {}
    with untouched(net), torch.no_grad():
        net.eval()
        with ExitStack() as hooks:
            for name, module in net.named_modules():
                keep = module.register_forward_hook(lambda _, args, out, name=name: seen.update({name: out}))
                hooks.enter_context(keep)
            net(images[:1])
    seen.pop("", None)
    maps = [name for name, out in seen.items() if _is_map(out)]  # in the order in which they ended
    blocks = [name for name in seen if name.endswith("norm1")]
    tokens = blocks and getattr(first_tensor(seen[blocks[-1]]), "ndim", 0) == 3
    if released := [name for name in maps if re.fullmatch(rf"({re.escape(_EXPERTS)}\d+\.)?layer3", name)]:
        return released[-1]
    if tokens:
        return blocks[-1]
    if not maps:
        raise UserError("Grad-CAM needs a layer that gives maps or tokens, and none was found: name one (--layer).")
    return maps[-1]


def _is_map(out: Any) -> bool:
    return isinstance(out, Tensor) and out.ndim == 4 and out.shape[2] * out.shape[3] > 1 and out.shape[2] > 1


def draw_explained(explained: Mapping[str, Explained]) -> Image.Image:
    """The images with their classes, and below them a row for each network."""
    first = next(iter(explained.values()))
    maps = {name: each.maps for name, each in explained.items()}
    return draw_grad_cam(
        maps, first.pictures, first.classes, {name: each.predicted for name, each in explained.items()}
    )


def caption_of(explained: Explained, class_counts: Sequence[int], names: Sequence[str], seed: int) -> str:
    """How the images were chosen, in words."""
    counts = [class_counts[list(names).index(name)] for name in explained.classes]
    least, most = min(counts), max(counts)
    classes = f"classes of {least if least == most else f'{least} to {most}'} training images"
    return RULE.format(classes=classes, seed=seed, layer=explained.layer)


def grad_cam_of(task: Any, data: Any, trainer: Any) -> dict[str, Any]:
    """Analysis after training: the picture of this run, in its folder, where `batchformer report` finds it.

    The images depend on the data alone, so that runs with and without the module show the same ones.
    """
    labels = getattr(data, "set_labels", {}).get(data.evaluation_sets[0])
    if labels is None or not hasattr(data, "mean"):
        return {}
    task.net.to(trainer.strategy.root_device).float()  # of a run in 16 or 64 bits too: training is over
    found = explain(task, data, rare_images(task.class_counts, labels))
    caption = caption_of(found, task.class_counts, [str(name) for name in task.data_info.classes], 0)
    sheet = draw_explained({"evidence for the true class": found})
    write_index(Path(trainer.default_root_dir) / FOLDER, [("grad-cam.png", sheet, TITLE, caption)], keep=False)
    return {}
