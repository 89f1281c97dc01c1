"""`--init-from`: initial weights from a run folder, a file or a folder of `save_pretrained`, for every task."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import batchformer as bf
from batchformer.errors import UserError
from batchformer.models.create import read_tensors

NETWORK = "network"  # the part that is the whole network
_MODULE = "batchformer."  # prefix of the keys that attach adds to a model


def read_checkpoint(path: Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint (tensors and plain values only); a missing or damaged one is a `UserError`."""
    if not path.is_file():
        raise UserError(f"There is no checkpoint at {path}; train first (batchformer fit), or name another run folder.")
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except Exception as problem:  # zip, pickle and end-of-file errors all mean the same to the user
        raise UserError(
            f"The checkpoint {path} is damaged and cannot be read ({type(problem).__name__}); "
            "restore it from a copy, or train again with --overwrite."
        ) from problem


def read_weights(source: str | Path) -> dict[str, Tensor]:
    """The tensors by name: of a run folder, of a .safetensors, .pth, .pt or .ckpt file, or of `save_pretrained`.

    Nothing in a file is executed. Of a run it is the network; of files that hold more than weights, what is under
    `state_dict` or `model`, without the prefixes of Lightning (`net.`) and DDP (`module.`).
    """
    path = Path(source).expanduser()
    if path.is_dir():
        for name in ("best.ckpt", "last.ckpt") if (path / "result.json").is_file() else ("last.ckpt",):
            if (checkpoint := path / "checkpoints" / name).is_file():
                return _network_of(read_checkpoint(checkpoint)["state_dict"])
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise UserError(
                f"{path} holds no weights: give a run folder (with checkpoints/last.ckpt), a folder written by "
                f"save_pretrained (with model.safetensors), or a file."
            )
        return {name: tensor for file in files for name, tensor in read_tensors(file).items()}
    if not path.is_file():
        raise UserError(f"there is no file {path} with weights: give its path, or leave --init-from out.")
    tensors = read_tensors(path)
    return tensors if path.suffix == ".safetensors" else _network_of(tensors)


def _network_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    for prefix in ("net.", "module."):
        if any(key.startswith(prefix) for key in state):
            state = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    return dict(state)


def load_weights(
    net: nn.Module, part: str, source: str, attached: bool, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Load weights into the network, or into its submodule `part`; the module's weights where both have a module.

    A classifier of other classes stays as it is, with a warning; any other difference is refused. `weights`: what was
    read from the source already.
    """
    if part != NETWORK and part not in dict(net.named_modules()):
        inside = ", ".join(name for name, _ in net.named_children())
        raise UserError(f"--init-from {part}={source}: the network has no part {part}; it has: {inside}.")
    target = net if part == NETWORK else net.get_submodule(part)
    weights = read_weights(source) if weights is None else weights
    if any(key.startswith(f"{part}.") for key in weights):  # a file of the whole network
        weights = {key.removeprefix(f"{part}."): v for key, v in weights.items() if key.startswith(f"{part}.")}
    weights = without_outer_name(weights, target.state_dict())
    if not attached or not any(key.startswith(_MODULE) for key in weights):
        weights = {key: value for key, value in weights.items() if not key.startswith(_MODULE)}
    own = target.state_dict()
    if "features.0.0.weight" in weights:
        from batchformer.models.detector_backbone import named_as_in_timm

        weights = named_as_in_timm(weights, target)
    expected = [key for key in own if not key.startswith(_MODULE) or any(k.startswith(_MODULE) for k in weights)]
    left_out = _other_classifier(target, own, weights)
    needed = [key for key in expected if key not in left_out]
    missing = [key for key in needed if key not in weights and not key.endswith("num_batches_tracked")]
    shapes = [key for key in needed if key in weights and weights[key].shape != own[key].shape]
    if missing or shapes:
        first = missing[0] if missing else shapes[0]
        what = "it has no" if missing else f"it has the shape {tuple(weights[first].shape)} of"
        raise UserError(
            f"--init-from {source} does not fit the {part}: {what} {first} ({len(missing) + len(shapes)} of {len(own)} "
            f"tensors); give the weights of this network, or choose the network of the file."
        )
    if left_out:
        warnings.warn(
            f"{source}: the classifier is of other classes and starts untrained ({left_out[0]}).", stacklevel=2
        )
    fitting = {key: weights[key] for key in needed if key in weights}
    target.load_state_dict(fitting, strict=False)


def without_outer_name(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Weights of a network that holds this one under a name: `encoder.` of a masked autoencoder, `backbone.` ...

    Nothing is changed where some of the keys are the network's own; modules are called alike in all networks.
    """
    if any(key in own and not key.startswith(_MODULE) for key in weights):
        return weights
    names = {key[: -len(inner) - 1] for key in weights for inner in own if key.endswith(f".{inner}")}
    inside = {name: sum(f"{name}.{inner}" in weights for inner in own) for name in names}
    if not inside:
        return weights
    prefix = max(sorted(inside), key=lambda name: inside[name]) + "."
    return {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}


def _other_classifier(target: nn.Module, own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> list[str]:
    try:
        names = bf.find_classifiers(target)
    except (UserError, ValueError):
        return []
    keys = [f"{name}.{kind}" for name in names for kind in ("weight", "bias")]
    differ = [key for key in keys if key in own and (key not in weights or weights[key].shape != own[key].shape)]
    return keys if differ else []
