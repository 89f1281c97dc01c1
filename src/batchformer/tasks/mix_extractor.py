"""The frozen network of Attentive CutMix, by its name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from batchformer.errors import UserError, did_you_mean
from batchformer.mix import feature_map


def load_extractor(name: str, checkpoint: str | None = None) -> nn.Module:
    """A timm model, or a torchvision one where timm knows no such name, cut off after its last feature map.

    With `checkpoint` its weights come from that file, without it they are the pretrained ones of the library, which
    may have to fetch them.
    """
    try:
        model = _create(name, pretrained=checkpoint is None)
    except (OSError, RuntimeError) as problem:  # huggingface_hub's and urllib's are OSErrors
        if checkpoint is not None:
            raise
        raise UserError(
            f"the pretrained weights of the extractor {name} could not be fetched ({type(problem).__name__}): give a "
            f"file that holds them, --model.mix.extractor_checkpoint FILE."
        ) from problem
    if checkpoint is not None:
        _load(model, name, Path(checkpoint))
    return feature_map(model.eval().requires_grad_(False))


def wanted_normalisation(name: str) -> tuple[Sequence[float], ...]:
    """The mean and std a timm model was trained with; nothing for torchvision's, which all have ImageNet's."""
    import timm

    config = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    return () if config is None else (config.mean, config.std)


def _create(name: str, pretrained: bool) -> nn.Module:
    import timm
    import torchvision

    if timm.is_model(name):
        return timm.create_model(name, pretrained=pretrained)
    if name in torchvision.models.list_models():
        return torchvision.models.get_model(name, weights="DEFAULT" if pretrained else None)
    hint = did_you_mean(name, [*timm.list_models(), *torchvision.models.list_models()], count=3)
    raise UserError(
        f"model.mix.extractor {name!r} is known neither to timm nor to torchvision.{hint or ' See timm.list_models().'}"
    )


def _load(model: nn.Module, name: str, file: Path) -> None:
    from timm.models import load_state_dict

    if not file.is_file():
        raise UserError(f"model.mix.extractor_checkpoint: there is no file {file}.")
    try:
        model.load_state_dict(load_state_dict(str(file), use_ema=False))
    except Exception as problem:  # a damaged file, keys or shapes of another network
        reason = " ".join(str(problem).split())[:200]
        raise UserError(f"{file} does not hold the weights of a {name}: {reason}.") from problem
