"""Which submodules of a model are its classifiers."""

from __future__ import annotations

from typing import Any

from torch import nn

from batchformer.errors import UserError, nearest

# The names torchvision (and much code written after it) gives to the classifier or to a container that ends in it.
_USUAL_NAMES = ("fc", "classifier", "heads", "head")


def find_classifiers(model: nn.Module) -> list[str]:
    """Dotted paths of the layers that turn features into class scores.

    timm says it itself (`pretrained_cfg["classifier"]`, or `get_classifier()`), several for models with several heads;
    transformers has a `classifier` beside its backbone, or several whose names end so; torchvision uses one of a few
    names, for a container then the last Linear or 1x1 convolution in it; in a plain `nn.Sequential` it is the last
    Linear.
    """
    ways = (_named_by_timm, _found_by_getter, _named_by_transformers, _usually_named, _last_of_sequential)
    named = next((found for found in (way(model) for way in ways) if found), [])
    named = [_last_of_container(model, path) for path in named]
    paths = [path for path in named if _scores(model.get_submodule(path))]
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


def _scores(module: nn.Module) -> bool:
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


def _last_of_container(model: nn.Module, path: str) -> str:
    """A head of several layers ends in the one that scores: the features are what enters that one."""
    module = model.get_submodule(path)
    # PEFT's adapters: what they add stands beside the `base_layer`, and both read what enters the adapter
    adapted = getattr(module, "base_layer", None) if hasattr(module, "get_base_layer") else None
    whole = isinstance(module, nn.Linear | nn.Conv2d) or isinstance(adapted, nn.Linear | nn.Conv2d)
    inner = None if whole else _last_scoring_layer(module)
    return f"{path}.{inner}" if inner else path


def _last_of_sequential(model: nn.Module) -> list[str]:
    inner = _last_scoring_layer(model, linear_only=True) if isinstance(model, nn.Sequential) else None
    return [inner] if inner else []


def _last_scoring_layer(module: nn.Module, linear_only: bool = False) -> str | None:
    kinds = nn.Linear if linear_only else (nn.Linear, nn.Conv2d)
    names = [name for name, child in module.named_modules() if isinstance(child, kinds)]
    return names[-1] if names else None
