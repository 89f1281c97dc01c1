"""Where BatchFormer goes: before the classifier, or before any layer that was named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from batchformer.attach.classifiers import get_submodule
from batchformer.attach.dry_run import Example
from batchformer.attach.feature import Channels, feature_from_layer, feature_from_tensor
from batchformer.attach.insertion import Before, Once
from batchformer.attach.point import Point, move_beside
from batchformer.attach.separate_norm import BatchNormMode, SeparateNorm, separate_norms
from batchformer.attach.trial import on_trial
from batchformer.attach.watch import grown, tensors_entering, watch
from batchformer.errors import UserError
from batchformer.nn import BatchFormer


def points_before(
    model: nn.Module,
    paths: list[str],
    dim: int | None,
    channels: Channels | None,
    keywords: Mapping[str, Any],
    example: Example | None,
) -> list[Point]:
    """Heads that read the same feature are one place, with one module; heads that read different ones are several."""
    if not paths:
        raise UserError("before=[] names no place: leave it out to find the classifier, or name a submodule.")
    for path in paths:
        if isinstance(get_submodule(model, path), nn.ModuleList | nn.ModuleDict):
            raise UserError(f"{path!r} is a list of layers, which is never called itself: name one of its layers.")
    if len({id(model.get_submodule(path)) for path in paths}) < len(paths):
        raise UserError("before= names one submodule twice: name each place once.")
    groups = _heads_by_feature(model, paths, example)
    return [_make_point(model, group, dim, channels, keywords, seen) for group, seen in groups]


def _heads_by_feature(
    model: nn.Module, paths: list[str], example: Example | None
) -> list[tuple[list[str], Tensor | None]]:
    """Paths grouped by the tensor they read, in the order the model calls them."""
    if len(paths) == 1 and feature_from_layer(model.get_submodule(paths[0])) is not None:
        return [(paths, None)]
    groups: list[tuple[list[str], Tensor | None]] = []
    for path, tensor in tensors_entering(model, paths, example).items():
        group = next((g for g, seen in groups if seen is tensor), None)
        if group is None:
            groups.append(([path], tensor))
        else:
            group.append(path)
    return groups


def _make_point(
    model: nn.Module,
    paths: list[str],
    dim: int | None,
    channels: Channels | None,
    keywords: Mapping[str, Any],
    seen: Tensor | None,
) -> Point:
    layers = [model.get_submodule(path) for path in paths]
    known = feature_from_layer(layers[0])
    if known is None and (dim is None or channels is None) and seen is not None:
        known = feature_from_tensor(seen, paths[0])
    dim = dim if dim is not None else known.dim if known else None
    channels = channels or (known.channels if known else "last")
    if dim is None:
        raise UserError(f"the width of what enters {paths[0]!r} is not known: say dim=.")
    module = BatchFormer(dim, **keywords)
    move_beside(module, [*layers, model])
    feature, final = Once(module, channels), len(layers) - 1
    insertions = [Before(layer, feature, i == 0, i == final) for i, layer in enumerate(layers)]
    return Point(tuple(paths), module, insertions, feature)


def norms_behind(
    model: nn.Module, points: list[Point], batch_norm: BatchNormMode, example: Example | None
) -> list[SeparateNorm]:
    """What keeps the streams apart in each BatchNorm behind the places: those in the heads; and where some are
    registered after the heads, those a dry run shows both streams to reach (none, of a model that cannot be run dry).
    """
    module, heads = points[0].module, [piece.layer for point in points for piece in point.insertions]
    names = {part: name for name, part in model.named_modules()}
    inside = [names[part] for head in heads for part in head.modules()]
    order = list(names.values())
    later = order[max(map(order.index, inside)) + 1 :]
    if separate_norms(model, module, later, batch_norm):  # a classifier is mostly the last: no dry run for those
        inside += _names_with_both_streams(model, points, example)
    return separate_norms(model, module, dict.fromkeys(inside), batch_norm)


def _names_with_both_streams(model: nn.Module, points: list[Point], example: Example | None) -> set[str]:
    """The submodules that get twice the rows when the streams are opened."""
    pieces = [piece for point in points for piece in point.insertions]
    try:
        plain = watch(model, 2, example)
        with on_trial(pieces, [point.module for point in points], streams="duplicate"):
            both = watch(model, 2, example)
    except UserError:
        return set()
    finally:
        for point in points:
            point.feature.forget()
    return grown(plain, both)
