"""Grad-CAM (BatchFormer, Fig. 5): the evidence for a class at each place of a layer's feature map or tokens."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from batchformer.attach.contexts import untouched
from batchformer.attach.probe import first_tensor
from batchformer.errors import UserError, check_choice
from batchformer.nn.token_layout import as_tokens, layout_of, side_of_channels


def grad_cam(
    model: nn.Module,
    images: Float[Tensor, "batch channel height width"],
    layer: str | Sequence[str],
    targets: Int[Tensor, " batch"] | None = None,
    *,
    channels: Literal["auto", "first", "last"] = "auto",
) -> Float[Tensor, "batch row column"]:
    """Grad-CAM maps for a class, each scaled to a maximum of 1; on the CPU.

    With A the output of `layer` and y the score of the class: ReLU(sum_c w_c A_c), w_c the mean of dy/dA_c over the
    places (Selvaraju et al., eqs. 1 and 2). Computed in eval mode, that is of the plain model, which is what the paper
    shows: the module acts in training alone, and the map shows its effect on the trained weights. The model is not
    changed. An image without evidence for the class is 0 everywhere.

    Args:
        model: gives scores (batch, classes), or an output with `logits`, as transformers' classifiers do.
        layer: path of a submodule that gives maps (batch, C, H, W), (batch, H, W, C) or tokens (batch, N, C); tokens
            before those of the patches are left out. `layer4` of a ResNet. In a ViT not the last block when the
            classifier reads the class token, because the patches that leave it are not read, but `norm1` in it. Several
            paths to maps of one size count as one layer with the channels of all: those of a network's experts.
        targets: classes to explain; None: those the model predicts.
        channels: of maps; "auto" infers them from the sides of the images.
    """
    if not isinstance(images, Tensor) or images.ndim != 4:
        raise UserError("images must be one tensor with the whole batch, (batch, channel, height, width).")
    check_choice("channels", channels, ("auto", "first", "last"))
    paths = [layer] if isinstance(layer, str) else list(layer)
    seen: dict[str, Any] = {}
    with untouched(model):
        model.eval()
        with ExitStack() as hooks:
            for path in paths:
                keep = _submodule(model, path).register_forward_hook(
                    lambda _, args, out, path=path: seen.update({path: first_tensor(out)})
                )
                hooks.enter_context(keep)
            outputs = model(images.clone().requires_grad_())
        scores = getattr(outputs, "logits", outputs)
        if not isinstance(scores, Tensor) or scores.ndim != 2:
            raise UserError("Grad-CAM explains scores (batch, classes), or an output with logits of that shape.")
        if not seen:
            raise UserError(f"{layer!r} is not used in a forward of the model: choose another submodule.")
        targets = scores.argmax(1) if targets is None else _checked(targets, scores)
        chosen = scores.gather(1, targets[:, None]).sum()  # images are independent in eval mode
        gradients = torch.autograd.grad(chosen, list(seen.values()), allow_unused=True)
    read = [(x, slope) for x, slope in zip(seen.values(), gradients, strict=True) if slope is not None and slope.any()]
    if not read:
        raise UserError(
            f"the scores do not depend on what leaves {layer!r} in the places: choose an earlier submodule."
        )
    features = read[0][0]
    if len(features) != len(images) or any(x.shape != features.shape for x, _ in read):
        raise UserError(
            f"what leaves {layer!r} is not one map for each of the {len(images)} images: choose another submodule."
        )
    side = side_of_channels(features, images) if channels == "auto" else channels
    layout = layout_of(features, side, images, model)
    if layout.grid is None:
        raise UserError(f"the output of {layer!r}, {tuple(features.shape)}, has no rows and columns.")
    values, slopes = (
        torch.cat([as_tokens(x, side).float()[:, layout.prefix :] for x in each], -1)
        for each in zip(*read, strict=True)
    )
    if not bool(slopes.any()):
        raise UserError(f"the scores do not depend on the patches that leave {layer!r}: choose an earlier submodule.")
    evidence = (values * slopes.mean(dim=1, keepdim=True)).sum(-1).relu()
    most = evidence.amax(dim=1, keepdim=True)
    return (evidence / most.clamp_min(torch.finfo(most.dtype).tiny)).reshape(-1, *layout.grid).cpu()


def _submodule(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as problem:
        raise UserError(f"there is no submodule {path!r}: model.named_modules() lists all.") from problem


def _checked(targets: Any, scores: Float[Tensor, "batch class"]) -> Int[Tensor, " batch"]:
    try:
        given = torch.as_tensor(targets, device=scores.device)
    except (TypeError, ValueError, RuntimeError):
        given = torch.empty(0)
    whole = not given.is_floating_point() and given.dtype != torch.bool
    if not whole or given.shape != scores.shape[:1] or not bool(((given >= 0) & (given < scores.shape[1])).all()):
        raise UserError(
            f"targets= must be the number of one of the {scores.shape[1]} classes for each of the {len(scores)} images."
        )
    return given.long()
