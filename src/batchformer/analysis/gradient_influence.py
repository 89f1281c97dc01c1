"""The gradient of a sample's loss at the *other* samples of its batch (paper, eq. 3 and Fig. 6).

Eq. 3 splits the gradient of one sample's loss into its own part and a part on the others,

    dL_i / dX = dL_i / dX_i + sum over j != i of dL_i / dX_j,

and says that the second part exists only through BatchFormer. Fig. 6 shows its norm per class over the test set and
finds: the rarer the class, the larger. Here: influence of i = sum over j != i of the Euclidean norm of dL_i / dX_j,
with L_i the cross entropy of the *related* row of i behind the shared classifier (the plain row is independent of the
others), averaged over the samples of a class. The network and the module are in eval mode, so neither dropout nor
batch statistics take part.

The paper does not say which norm, loss or `X` it drew; its released code does (run_networks.py, debug 1, and
grads_analysis.py of BalancedSoftmax): X is what enters the module, the norm is the mean absolute entry of dL_i / dX_j
over all j != i (`norm="absolute"`), and L is the training loss, Balanced Softmax, whose prior by itself gives rare
classes larger gradients (`criterion=`). What it plots is not the value of each class but the running mean over the
classes up to it, the most frequent first, which hides how much classes differ: the report draws both.

`gradient_on_others` is the same part as a share of the whole gradient, for modules at any depth.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from batchformer.analysis.recorded_forward import attachment_or_error
from batchformer.attach.contexts import Mode, evaluating, set_mode, untouched
from batchformer.data.loading.epoch_loader import images_and_labels
from batchformer.errors import UserError, check_choice
from batchformer.nn.streams import plain_count, repeat_targets

Relate = Callable[[Tensor], Tensor]
Criterion = Callable[[Tensor, Tensor], Tensor]
RowLosses = Callable[[Any, Any], Tensor]
GradientNorm = Literal["euclidean", "absolute"]

_CHUNK_BYTES = 256 * 2**20


@torch.inference_mode(False)
@torch.enable_grad()
def gradient_influence(
    net: nn.Module,
    attachment: Any,
    loader: Iterable[Any],
    num_classes: int,
    device: torch.device | str,
    wrt: Literal["features", "images"] = "features",
    max_batches: int | None = None,
    criterion: Criterion | None = None,
    mix_seed: int | None = 0,
    norm: GradientNorm = "euclidean",
) -> list[float]:
    """Per class: mean influence of its test samples on the other samples of their batch; nan for a class without any.

    Args:
        net, attachment: the attached model and its handle; the first insertion point and its first classifier are used.
        loader: test batches, dicts of `images` and `labels` or pairs.
        wrt: "features" (what enters the module; costs about one forward and backward of the module per sample and
            nothing of the backbone beyond one forward) or "images" (the pixels, as eq. 3 writes it; costs one backward
            of the whole backbone over the batch *per sample*: bound it with `max_batches`).
        max_batches: read only so many batches.
        criterion: losses per row from (logits, labels); None is cross entropy. With the prior of Balanced Softmax in
            the loss, rare classes have larger gradients by construction: say so where you report it.
        mix_seed: test sets are often sorted by class, and a batch of one class is not what the module was trained on:
            samples are shuffled over all batches read, by this seed. None keeps the loader's own batches.
        norm: "euclidean", summed over the other samples, or "absolute" as released, the mean absolute entry over them.
    """
    if norm not in ("euclidean", "absolute"):
        raise UserError(f"norm={norm!r} is not known: say 'euclidean' or 'absolute'.")
    point = attachment.points[0]
    classifier = net.get_submodule(point.paths[0])
    channels_first = getattr(point.site, "channels", "last") == "first"
    criterion = criterion or _cross_entropy
    totals = torch.zeros(num_classes, dtype=torch.float64)
    counts = torch.zeros(num_classes, dtype=torch.float64)

    def classify(x: Tensor) -> Tensor:
        logits = classifier(x.movedim(-1, 1) if channels_first else x)
        if isinstance(logits, Tensor) and logits.shape[2:] == (1, 1):  # a convolution over what pooling left
            logits = logits.flatten(1)
        if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] != num_classes:
            raise UserError(
                f"{point.paths[0]!r} does not give {num_classes} logits per sample: the gradient influence needs the "
                "module right before the classifier."
            )
        return logits

    def features_of(images: Tensor) -> Tensor:
        features = _input_of(classifier, net, images)
        return features.movedim(1, -1) if channels_first else features

    with evaluating(net), evaluating(point.module):
        for samples, labels in _batches(loader, features_of, device, wrt, max_batches, mix_seed):
            if len(labels) < 2:
                continue  # a batch of one has no other sample
            if wrt == "features":
                influence = influence_on_features(samples, labels, point.module.relate, classify, criterion, norm)
            else:
                images = samples.to(device).clone().requires_grad_()
                made = features_of(images)
                influence = influence_on_images(images, made, labels, point.module.relate, classify, criterion, norm)
            totals.index_add_(0, labels.cpu(), influence.double().cpu())
            counts.index_add_(0, labels.cpu(), torch.ones_like(influence, dtype=torch.float64, device="cpu"))
    return (totals / counts).tolist()  # 0 / 0 is nan: a class without test samples


def influence_on_features(
    features: Float[Tensor, "batch *position dim"],
    labels: Int[Tensor, " batch"],
    relate: Relate,
    classify: Relate,
    criterion: Criterion | None = None,
    norm: GradientNorm = "euclidean",
) -> Float[Tensor, " batch"]:
    """For each sample i: sum over j != i of the norm of dL_i / d features_j, or their mean absolute entry."""
    influence = torch.empty(len(features), dtype=features.dtype, device=features.device)
    for rows, gradients in _feature_gradients(features, labels, relate, classify, criterion or _cross_entropy):
        influence[rows] = _norm_on_others(gradients, rows, norm)
    return influence


def influence_on_images(
    images: Float[Tensor, "batch channel height width"],
    features: Float[Tensor, "batch *position dim"],
    labels: Int[Tensor, " batch"],
    relate: Relate,
    classify: Relate,
    criterion: Criterion | None = None,
    norm: GradientNorm = "euclidean",
) -> Float[Tensor, " batch"]:
    """The same at the pixels: the gradients at the features go on through the graph that made `features` of `images`.

    In eval mode a feature depends on its own image only, so one backward over the batch per sample i gives
    dL_i / d images_j for all j, exactly.
    """
    influence = torch.empty(len(features), dtype=features.dtype, device=features.device)
    for rows, gradients in _feature_gradients(features.detach(), labels, relate, classify, criterion or _cross_entropy):
        for k, row in enumerate(rows.tolist()):
            (at_pixels,) = torch.autograd.grad(features, images, gradients[:, k], retain_graph=True)
            influence[row] = _norm_on_others(at_pixels.unsqueeze(1), rows[k : k + 1], norm)[0]
    return influence


def _feature_gradients(
    features: Tensor, labels: Tensor, relate: Relate, classify: Relate, criterion: Criterion
) -> Iterator[tuple[Tensor, Tensor]]:
    """Chunks of (rows i, dL_i / d features as (batch, rows, *position, dim)).

    The module treats positions independently. So k copies of the batch, laid out as k positions, are k independent
    batches: the loss of row i_k is read from copy k alone, and one ordinary backward of the sum gives all k gradients
    without mixing them. Exact, and it works with every kernel that has a backward.
    """
    batch = len(features)
    floats_per_copy = batch * (16 * features[0].numel() + 8 * batch)  # activations, attention weights
    copies = max(1, min(batch, _CHUNK_BYTES // (floats_per_copy * features.element_size())))
    for rows in torch.arange(batch, device=features.device).split(copies):
        k = torch.arange(len(rows), device=features.device)
        copied = features.detach().unsqueeze(1).repeat_interleave(len(rows), dim=1).requires_grad_()
        losses = criterion(classify(relate(copied)[rows, k]), labels[rows])
        (gradients,) = torch.autograd.grad(losses.sum(), copied)
        yield rows, gradients


def _norm_on_others(
    gradients: Float[Tensor, "batch rows *rest"], rows: Int[Tensor, " rows"], norm: GradientNorm
) -> Tensor:
    gradients = gradients.flatten(2)
    norms = gradients.norm(dim=2) if norm == "euclidean" else gradients.abs().mean(2) / (len(gradients) - 1)
    norms[rows, torch.arange(len(rows), device=rows.device)] = 0
    return norms.sum(0)


def _batches(
    loader: Iterable[Any],
    features_of: Callable[[Tensor], Tensor],
    device: torch.device | str,
    wrt: str,
    max_batches: int | None,
    mix_seed: int | None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of (features on the device, or images) and labels, shuffled over all that were read."""
    check_choice("wrt", wrt, ("features", "images"))
    samples, labels = [], []
    for index, batch in enumerate(loader):
        images, targets = images_and_labels(batch)
        if max_batches is not None and index >= max_batches:
            break
        with torch.no_grad():
            samples.append(features_of(images.to(device)).float() if wrt == "features" else images)
        labels.append(targets.to(device))
    if not labels:
        raise UserError("the gradient influence needs at least one batch of test images, got none.")
    if mix_seed is None:
        yield from zip(samples, labels, strict=True)
        return
    all_samples, all_labels = torch.cat(samples), torch.cat(labels)
    order = torch.randperm(len(all_labels), generator=torch.Generator().manual_seed(mix_seed))
    for rows in order.split(len(labels[0])):
        yield all_samples[rows.to(all_samples.device)], all_labels[rows.to(device)]


def _input_of(layer: nn.Module, net: nn.Module, images: Tensor) -> Tensor:
    """What enters the layer in a forward of the net."""
    seen: list[Tensor] = []
    with layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])):
        net(images)
    if len(seen) != 1:
        raise UserError(f"the classifier was called {len(seen)} times in one forward: its input is not one feature.")
    return seen[0]


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


@dataclass
class GradientOnOthers:
    """Share of the gradient of a related row's loss that is on other samples, as a mean over the measured samples.

    `norm_share`: sum over j != i of |g_ij| / sum over all j of |g_ij|. `squared_share`: the same of |g_ij|^2, the part
    of the gradient's energy. g_ij is the gradient of the loss of sample i's related row at sample j's tokens (or
    pixels). Many small gradients add up in the first and hardly count in the second: say which one you quote.
    """

    norm_share: float
    squared_share: float
    samples: int


def gradient_on_others(
    model: nn.Module,
    inputs: Tensor,
    targets: Any,
    *,
    wrt: Literal["tokens", "images"] = "tokens",
    mode: Mode = "train",
    samples: int = 8,
    row_losses: RowLosses | None = None,
    seed: int = 0,
) -> GradientOnOthers:
    """How much of the gradient of one sample's loss falls on the other samples of its batch (paper, eq. 3).

    Args:
        wrt: at the tokens that enter the first insertion, or at the pixels.
        mode: "train" has dropout on and BatchNorm on the statistics of the batch (which relates samples, too);
            "quiet" has neither: what is on others then came through the insertions.
        samples: for so many samples, spread evenly over the related rows; each costs one backward.
        row_losses: losses per row from (outputs, targets); None: cross entropy with class ids or soft labels.
    """
    attachment = attachment_or_error(model)
    row_losses = row_losses or cross_entropy_rows
    if len(inputs) < 2:
        raise UserError("the gradient on other samples needs a batch of two images or more.")
    check_choice("wrt", wrt, ("tokens", "images"))
    if samples < 1:
        raise UserError(f"samples={samples}: the gradient is that of one sample or more.")
    entered: list[Tensor] = []

    def as_leaf(module: nn.Module, args: tuple[Any, ...]) -> Any:
        if entered:
            return None
        entered.append(args[0].detach().requires_grad_())
        return (entered[0], *args[1:])

    with untouched(attachment.model, seed):
        set_mode(attachment.model, mode)
        if wrt == "images":
            entered.append(inputs.detach().clone().requires_grad_())
        with attachment.points[0].module.register_forward_pre_hook(as_leaf):
            outputs = attachment.model(entered[0] if wrt == "images" else inputs)
        losses = row_losses(outputs, repeat_targets(targets, outputs))
        plain = plain_count(len(losses), attachment.points[0].module.streams)
        # Row `plain + i` is image i where the batch was doubled, and image `plain + i` where it was split.
        first_image = 0 if attachment.points[0].module.streams == "duplicate" else plain
        related = losses[plain:] * loss_scale(inputs.device)
        chosen = torch.arange(min(samples, len(related))) * len(related) // min(samples, len(related))
        norm_shares, squared_shares = [], []
        for i in chosen.tolist():
            (gradient,) = torch.autograd.grad(related[i], entered[0], retain_graph=True)
            norms = gradient[: len(inputs)].flatten(1).double().norm(dim=1)
            own = norms[first_image + i]
            norm_shares.append(1 - own / norms.sum())
            squared_shares.append(1 - own.square() / norms.square().sum())
    return GradientOnOthers(
        torch.stack(norm_shares).mean().item(), torch.stack(squared_shares).mean().item(), len(norm_shares)
    )


def loss_scale(device: torch.device) -> float:
    """Under float16 autocast gradients of single rows underflow: scale the loss, as training does."""
    half = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == torch.float16
    return 2.0**12 if half else 1.0


def cross_entropy_rows(outputs: Any, targets: Tensor) -> Tensor:
    """Losses per row of logits, of an output with `.logits`, or the mean over a tuple of logits (distilled DeiT)."""
    if isinstance(outputs, tuple | list):
        return torch.stack([cross_entropy_rows(o, targets) for o in outputs]).mean(0)
    logits = getattr(outputs, "logits", outputs)
    if not isinstance(logits, Tensor) or logits.ndim != 2 or not isinstance(targets, Tensor):
        raise UserError(
            "the losses of rows are those of logits (rows, classes) and a tensor of class ids or soft labels: for any "
            "other model give row_losses=."
        )
    return F.cross_entropy(logits.float(), targets, reduction="none")
