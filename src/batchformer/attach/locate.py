"""Find the submodules to attach at by their names, and the width and layout of the features there.

Classifiers by what timm, transformers and torchvision call them, blocks and encoder layers by number; a feature by the
layer that reads it, or by the tensor that a dry run showed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from batchformer.attach.probe import Calls
from batchformer.errors import UserError, nearest
from batchformer.nn.token_layout import Channels

# The names torchvision (and much code written after it) gives to the classifier or to a container that ends in it.
_USUAL_NAMES = ("fc", "classifier", "heads", "head")


def find_classifiers(model: nn.Module) -> list[str]:
    """Dotted paths of the layers that turn features into class scores.

    timm says it itself (`pretrained_cfg["classifier"]`, or `get_classifier()`), several for models with several heads;
    transformers has a `classifier` beside its backbone, else several whose names end so; torchvision uses one of a few
    names, for a container then the last Linear or 1x1 convolution in it; in a plain `nn.Sequential` it is the last
    Linear.
    """
    ways = (_named_by_timm, _found_by_getter, _named_by_transformers, _usually_named)
    named = next((found for found in (way(model) for way in ways) if found), [])
    if not named and isinstance(model, nn.Sequential) and (last := _last_scoring_layer(model, linear_only=True)):
        named = [last]
    # DeiT's own distilled class says `head` alone
    beside = [f"{path}_dist" for path in named if model._modules.get(f"{path}_dist") and f"{path}_dist" not in named]
    named = [last_of_container(model, path) for path in [*named, *beside]]
    paths = [path for path in named if _has_weights(model.get_submodule(path))]
    if paths:
        return paths
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name][-5:]
    hint = f"its last Linear layers are {', '.join(map(repr, linear))}" if linear else "it has no Linear layer"
    raise UserError(
        f"{type(model).__name__} has no classifier that attach can find ({hint}): name the layer that turns features "
        f'into scores with before="path.to.layer", or build the model with num_classes above 0.'
    )


def get_submodule(model: nn.Module, path: str) -> nn.Module:
    """`model.get_submodule(path)`; an unknown path is answered with the nearest names."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    if path not in names:
        near = nearest(path, names, count=3) or names[-3:]
        raise UserError(
            f"{type(model).__name__} has no submodule {path!r}; the nearest names are {', '.join(map(repr, near))}."
        )
    return model.get_submodule(path)


def _has_weights(module: nn.Module) -> bool:
    """A layer of weights: models built with num_classes=0 have an Identity in the classifier's place."""
    return isinstance(module, nn.Linear | nn.Conv2d) or (
        not isinstance(module, nn.Identity) and next(module.parameters(), None) is not None
    )


def _named_by_timm(model: nn.Module) -> list[str]:
    config: Any = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    named = config.get("classifier") if isinstance(config, dict) else getattr(config, "classifier", None)
    paths = [named] if isinstance(named, str) else list(named or ())
    known = dict(model.named_modules())
    return [path for path in paths if path in known]


def _found_by_getter(model: nn.Module) -> list[str]:
    getter = getattr(model, "get_classifier", None)
    if not callable(getter):
        return []
    found = getter()
    layers = found if isinstance(found, tuple | list) else (found,)
    return [name for layer in layers for name, module in model.named_modules() if module is layer and name]


def _named_by_transformers(model: nn.Module) -> list[str]:
    backbone = getattr(model, "base_model_prefix", None)
    if not isinstance(backbone, str) or backbone not in model._modules:
        return []
    beside = [name for name in model._modules if name.endswith("classifier")]
    beside = ["classifier"] if "classifier" in beside else beside  # DistilBERT has a `pre_classifier` before it
    return beside or [f"{backbone}.{path}" for path in _named_by_timm(model.get_submodule(backbone))]  # a timm model


def _usually_named(model: nn.Module) -> list[str]:
    children = ((name, model._modules.get(name)) for name in _USUAL_NAMES)
    found = [name for name, child in children if child is not None and _last_scoring_layer(child) is not None]
    if len(found) > 1:
        raise UserError(
            f"{type(model).__name__} has several layers that may be its classifier, {' and '.join(map(repr, found))}: "
            f"name the one that turns features into scores with before=."
        )
    return found


def last_of_container(model: nn.Module, path: str) -> str:
    """A head of several layers ends in the one that scores: the features are what enters that one."""
    module = model.get_submodule(path)
    # PEFT's adapters: what they add stands beside the `base_layer`, and both read what enters the adapter
    adapted = getattr(module, "base_layer", None) if hasattr(module, "get_base_layer") else None
    whole = isinstance(module, nn.Linear | nn.Conv2d) or isinstance(adapted, nn.Linear | nn.Conv2d)
    inner = None if whole else _last_scoring_layer(module)
    return f"{path}.{inner}" if inner else path


def _last_scoring_layer(module: nn.Module, linear_only: bool = False) -> str | None:
    kinds = nn.Linear if linear_only else (nn.Linear, nn.Conv2d)
    names = [name for name, child in module.named_modules() if isinstance(child, kinds)]
    return names[-1] if names else None


def block_paths(model: nn.Module, blocks: Sequence[int] | Literal["all"]) -> list[str]:
    """Paths of numbered blocks, counted from 0 (the papers count from 1); in Swin they are its stages."""
    backbone = getattr(model, "base_model_prefix", "")  # how transformers names what stands before the classifier
    roots = ("", f"{backbone}.") if isinstance(backbone, str) and backbone else ("",)
    for name in (root + usual for root in roots for usual in ("blocks", "encoder.layers", "layers", "encoder.layer")):
        try:
            model.get_submodule(name)
        except AttributeError:
            continue
        return _numbered_children(model, name, blocks, "block")
    raise UserError(
        f"{type(model).__name__} has no blocks under a standard name: name them with after=[paths]; its submodules are "
        f"{', '.join(name for name, _ in model.named_children())}."
    )


def encoder_layer_paths(model: nn.Module, numbers: Sequence[int] | Literal["all"]) -> list[str]:
    """Paths of the layers of a detector's encoder, counted from 0 (the papers' first layer, L1, is layer 0)."""
    found = [
        name
        for name, part in model.named_modules()
        if f".{name}".endswith(".encoder.layers") and len(list(part.children()))
    ]
    if not found:
        raise UserError(f"{type(model).__name__} has no encoder.layers: name submodules with after=[paths].")
    name = min(found, key=lambda name: name.count("."))
    return _numbered_children(model, name, numbers, "encoder layer")


def _numbered_children(model: nn.Module, name: str, numbers: Sequence[int] | Literal["all"], kind: str) -> list[str]:
    names = [f"{name}.{child}" for child, _ in model.get_submodule(name).named_children()]
    if numbers != "all" and not (isinstance(numbers, Sequence) and all(isinstance(k, Integral) for k in numbers)):
        raise UserError(f'{kind}s are a list of numbers, such as [{len(names) - 1}], or "all"; got {numbers!r}.')
    chosen = range(len(names)) if numbers == "all" else numbers
    if wrong := [k for k in chosen if not 0 <= k < len(names)]:
        raise UserError(f"{type(model).__name__} has {kind}s 0 to {len(names) - 1}: there is no {kind} {wrong[0]}.")
    return [names[k] for k in chosen]


@dataclass(frozen=True)
class Feature:
    """Width of a feature, and where its channels are."""

    dim: int
    channels: Channels


def feature_from_layer(layer: nn.Module) -> Feature | None:
    """The feature a layer reads, where its type determines it."""
    if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
        raise UserError(f"{type(layer).__name__} has no weights yet: run one batch through the model, then attach.")
    if isinstance(layer, nn.Linear):
        return Feature(layer.in_features, "last")
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return Feature(layer.in_channels, "first")
    if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
        return Feature(layer.num_features, "first")
    if isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) == 1:
        return Feature(layer.normalized_shape[0], "last")
    if isinstance(layer, nn.Sequential) and len(layer):
        return feature_from_layer(layer[0])
    return None


def feature_from_tensor(x: Tensor, path: str, scoring: str) -> Feature:
    """The feature a tensor is, where its shape determines it; `scoring`: the layer in `path` that turns it into scores.

    transformers' ResNet has a `classifier` that flattens a map of one pixel first: before its Linear there is one row.
    """
    if x.ndim in (2, 3):
        return Feature(x.shape[-1], "last")
    inside = "" if scoring == path else f"name the layer inside, before={scoring!r}, or "
    raise UserError(
        f"the input of {path!r} has the shape {tuple(x.shape)}, which is not clearly one feature or a row of tokens: "
        f'{inside}pass dim= and channels="first" or "last".'
    )


def feature_of_output(path: str, calls: Calls | None, dim: int | None, channels: Channels | None) -> Feature:
    """Width and layout of what a submodule gives."""
    if calls is None or not calls.begins:
        raise UserError(f"{path!r} is never called in a forward: name one that is (a list of layers is not).")
    x = calls.output
    if x is None:
        raise UserError(
            f"{path!r} returns neither a tensor nor a tuple or list with one: attach after a submodule that does."
        )
    if dim is not None and channels is not None:
        return Feature(dim, channels)
    if x.ndim == 3:
        layout = channels or "last"
        return Feature(dim or x.shape[1 if layout == "first" else -1], layout)
    if x.ndim == 4:
        square = {"first": x.shape[2] == x.shape[3], "last": x.shape[1] == x.shape[2]}
        fitting = [channels] if channels else [layout for layout, fits in square.items() if fits]
        if len(fitting) == 1:
            return Feature(x.shape[1 if fitting[0] == "first" else -1], fitting[0])  # type: ignore[arg-type]
    raise UserError(
        f"the output of {path!r} has the shape {tuple(x.shape)}, which is not clearly tokens (batch, tokens, width) or "
        f'a map: pass channels="first" or "last", and dim= where it is neither.'
    )


def known_layout(model: nn.Module, layer: nn.Module) -> Channels | None:
    """The axis of the channels, where the type of the layer or timm's own entry about the maps determines it."""
    if isinstance(layer, nn.Conv1d | nn.BatchNorm1d | nn.Conv2d | nn.BatchNorm2d):
        return "first"
    return {"NHWC": "last", "NCHW": "first"}.get(str(getattr(model, "output_fmt", None)))  # type: ignore[return-value]


def is_signal(calls: Calls, feature: Feature) -> bool:
    """(batch, channels, length)."""
    return calls.output is not None and calls.output.ndim == 3 and feature.channels == "first"
