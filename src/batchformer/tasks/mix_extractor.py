"""The frozen network of Attentive CutMix, by its name."""

from __future__ import annotations

import difflib
from pathlib import Path

from torch import nn

from batchformer.errors import UserError
from batchformer.mix import feature_map


def load_extractor(name: str, checkpoint: str | None = None) -> nn.Module:
    """A timm model, or a torchvision one where timm knows no such name, cut off after its last feature map.

    With `checkpoint` its weights come from that file, without it they are the pretrained ones of the library, which
    may have to fetch them.
    """
    import timm
    import torchvision

    if timm.is_model(name):
        model = timm.create_model(name, pretrained=checkpoint is None)
    elif name in torchvision.models.list_models():
        model = torchvision.models.get_model(name, weights="DEFAULT" if checkpoint is None else None)
    else:
        near = difflib.get_close_matches(name, [*timm.list_models(), *torchvision.models.list_models()], n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "see timm.list_models()."
        raise UserError(f"model.mix.extractor {name!r} is known neither to timm nor to torchvision: {hint}")
    if checkpoint is not None:
        _load(model, name, Path(checkpoint))
    return feature_map(model.eval().requires_grad_(False))


def _load(model: nn.Module, name: str, file: Path) -> None:
    from timm.models import load_state_dict

    if not file.is_file():
        raise UserError(f"model.mix.extractor_checkpoint: there is no file {file}.")
    try:
        model.load_state_dict(load_state_dict(str(file), use_ema=False))
    except Exception as problem:  # a damaged file, keys or shapes of another network
        reason = " ".join(str(problem).split())[:200]
        raise UserError(f"{file} does not hold the weights of a {name}: {reason}.") from problem
