"""Decide where modules go, from dry runs that leave no state: before classifiers, or after named submodules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from batchformer.attach.contexts import pieces_in_place
from batchformer.attach.doubled_input import double_input
from batchformer.attach.dry_run import Example, argument_names, takes_padded_images
from batchformer.attach.hooks import ForbidPartialForward, InputHook
from batchformer.attach.insertion import After, Before, InstanceForward, LayerPadding, SharedFeature
from batchformer.attach.locate import (
    Channels,
    Feature,
    feature_from_layer,
    feature_from_tensor,
    feature_of_output,
    get_submodule,
    is_signal,
    known_layout,
    last_of_container,
)
from batchformer.attach.per_stream import PROPOSAL_LOSS, BatchNormMode, MeanOfStreams, SeparateNorm, separate_norms
from batchformer.attach.plan import IMAGES, InsertionPlan, Point, check_apart, check_read, plan_in_place, rows_double
from batchformer.attach.probe import (
    Probe,
    check_batch_first,
    names_with_doubled_rows,
    parent_paths,
    probe_model,
    record_calls,
    tensors_entering,
)
from batchformer.errors import UserError
from batchformer.nn import BatchFormer
from batchformer.nn.batchformer_v2 import BatchFormerV2

_OTHER_WIDTHS = "share=True needs {} of one width and layout at all places: attach them with share=False."


def points_before(
    model: nn.Module,
    paths: list[str],
    share: bool,
    dim: int | None,
    channels: Channels | None,
    keywords: Mapping[str, Any],
    example: Example | None,
) -> list[Point]:
    """Heads that read the same feature are one place, with one module; heads that read different ones are several.

    `share`: several places with one module.
    """
    if not paths:
        raise UserError("before=[] is empty: leave it out to find the classifier, or name a submodule.")
    for path in paths:
        if isinstance(get_submodule(model, path), nn.ModuleList | nn.ModuleDict):
            raise UserError(f"{path!r} is a list of layers, which is never called itself: name one of its layers.")
    if len({id(model.get_submodule(path)) for path in paths}) < len(paths):
        raise UserError("before= names one submodule twice: name each one once.")
    points: list[Point] = []
    for group, seen in _heads_by_feature(model, paths, example):
        shared = points[0].module if share and points else None
        points.append(_make_point(model, group, dim, channels, keywords, seen, shared))
    return points


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
    module: BatchFormer | None,
) -> Point:
    layers = [model.get_submodule(path) for path in paths]
    known = feature_from_layer(layers[0])
    if known is None and (dim is None or channels is None) and seen is not None:
        known = feature_from_tensor(seen, paths[0], last_of_container(model, paths[0]))
    dim = dim if dim is not None else known.dim if known else None
    channels = channels or (known.channels if known else "last")
    if dim is None:
        raise UserError(f"the width of the input of {paths[0]!r} is not known: pass dim=.")
    if module is None:
        module = BatchFormer(dim, **keywords)
        _move_beside(module, [*layers, model])
    elif module.dim != dim:
        raise UserError(_OTHER_WIDTHS.format("features"))
    feature, final = SharedFeature(module, channels), len(layers) - 1
    insertions = [Before(layer, feature, i == 0, i == final) for i, layer in enumerate(layers)]
    return Point(tuple(paths), module, insertions, feature)


def norms_behind_heads(
    model: nn.Module, points: list[Point], batch_norm: BatchNormMode, example: Example | None
) -> list[SeparateNorm]:
    """What keeps the streams apart in each BatchNorm behind the places: those in the heads; and where some are
    registered after the heads, those a dry run shows both streams to reach (none where the dry run fails).
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
        plain = record_calls(model, 2, example)
        with pieces_in_place(pieces, [point.module for point in points], streams="duplicate"):
            both = record_calls(model, 2, example)
    except UserError:
        return set()
    finally:
        for point in points:
            point.site.forget()
    return names_with_doubled_rows(plain, both)


@dataclass(frozen=True)
class _NamedSubmodule:
    """A submodule that a module goes after: `path` is what the user calls it, `name` what dry runs call it."""

    path: str
    name: str
    layer: nn.Module


def plan_after(
    model: nn.Module,
    paths: Sequence[str],
    *,
    share: bool,
    batch_norm: BatchNormMode,
    mask_padding: bool,
    dim: int | None,
    channels: Channels | None,
    keywords: Mapping[str, Any],
    example: Example | None,
) -> InsertionPlan:
    """The insertions, then what lets both streams through the model around them; each step is tried in dry runs."""
    submodules = _named_submodules(model, paths)
    paddings = (
        {submodule: LayerPadding(submodule.layer, submodule.path) for submodule in submodules} if mask_padding else {}
    )
    probes = probe_model(model, example)
    seen = probes[0].two
    features = {submodule: _feature(model, submodule, probes[0], dim, channels) for submodule in submodules}
    probes = [probe for probe in probes if all(submodule.name in probe.two for submodule in submodules)]
    submodules.sort(key=lambda submodule: seen[submodule.name].begins[0])
    if share and len(set(features.values())) > 1:
        raise UserError(_OTHER_WIDTHS.format("outputs"))
    insertions: list[After] = []
    for submodule in submodules:
        feature = features[submodule]
        shared = insertions[0].module if share and insertions else None
        module = shared or BatchFormerV2(feature.dim, channels=feature.channels, **keywords)
        _move_beside(module, [submodule.layer, model])  # before the model runs with it
        signal = is_signal(seen[submodule.name], feature)
        insertions.append(After(submodule.layer, module, not insertions, paddings.get(submodule), signal))
    opener, first = submodules[0].name, insertions[0].module
    plan = InsertionPlan([submodule.path for submodule in submodules], insertions, InputHook(model, first), example)
    padded = takes_padded_images(model)  # a detector: masks and positions are made before the insertion
    if padded:
        for insertion in insertions:
            insertion.input_hook = plan.input_hook
    if first.streams == "duplicate":
        if padded or not all(rows_double(model, plan, probe.training)[0] for probe in probes):
            double_input(model, plan, opener, probes)
        if padded:
            plan.supports += _detector_supports(model, plan, opener)
        apart = ["forward_intermediates", *(["forward_features"] if plan.input_hook.doubles_input else [])]
        plan.supports += [
            ForbidPartialForward(model, name, plan.input_hook) for name in apart if hasattr(type(model), name)
        ]
    if not padded:
        check_read(model, plan, [submodule.path for submodule in submodules if seen[submodule.name].gives_several])
    behind = [name for probe in probes for name in _names_behind(model, plan, opener, probe, batch_norm)]
    plan.supports += separate_norms(model, first, dict.fromkeys(behind), batch_norm)
    if first.streams == "duplicate" and batch_norm == "separate" and not padded:
        check_apart(model, plan)
    return plan


def _named_submodules(model: nn.Module, paths: Sequence[str]) -> list[_NamedSubmodule]:
    if not paths:
        raise UserError("after=[] is empty: name a submodule.")
    first_names = {module: name for name, module in model.named_modules()}
    layers = [_last_called(get_submodule(model, path)) for path in paths]
    if len(set(layers)) < len(layers):
        raise UserError("after= names one submodule twice: name each one once.")
    return [_NamedSubmodule(path, first_names[layer], layer) for path, layer in zip(paths, layers, strict=True)]


def _feature(
    model: nn.Module, submodule: _NamedSubmodule, probe: Probe, dim: int | None, channels: Channels | None
) -> Feature:
    """Width and layout of what leaves the submodule, which must be called once and give a row for each image."""
    path, calls = submodule.path, probe.two.get(submodule.name)
    feature = feature_of_output(path, calls, dim, channels or known_layout(model, submodule.layer))
    assert calls is not None  # refused before
    if len(calls.begins) > 1:
        raise UserError(
            f"{path!r} is called {len(calls.begins)} times in a forward: name a submodule that is called once."
        )
    check_batch_first(path, calls, probe.three[submodule.name])
    return feature


def _names_behind(
    model: nn.Module, plan: InsertionPlan, opener: str, probe: Probe, batch_norm: BatchNormMode
) -> list[str]:
    """The submodules behind the insertion that both streams reach, BatchNorms among them.

    Being called later is not enough: a branch that leaves the model before the insertion (DeepLab's auxiliary head) has
    plain rows only. A dry run shows which get twice the rows; where it fails, all that are called later count.
    """
    first = plan.insertions[0].module
    names = probe.called_after(opener)
    if first.streams == "split":  # rows that are folded from several of an image cannot be told apart there
        names = [name for name in names if (0,) in probe.batch_arguments(name)]
    if not separate_norms(model, first, names, batch_norm):
        return []
    try:
        with plan_in_place(model, plan, streams="duplicate"):
            both = record_calls(model, IMAGES, plan.example, probe.training)
    except UserError:
        return names
    reached = names_with_doubled_rows(probe.two, both)
    return [name for name in names if name in reached]


def _last_called(module: nn.Module) -> nn.Module:
    """After a Sequential is after its last child; that one is called even where somebody runs the children one by one.

    (timm's ResNets do so under gradient checkpointing.)
    """
    while type(module).forward is nn.Sequential.forward and len(module._modules):
        module = module.get_submodule(list(module._modules)[-1])
    return module


def _detector_supports(model: nn.Module, plan: InsertionPlan, opener: str) -> list[InstanceForward]:
    """The loss as the mean of both streams; models inside that would take half of the images for the second stream."""
    supports: list[InstanceForward] = []
    if callable(getattr(model, "loss_function", None)):
        supports.append(MeanOfStreams(model, plan.insertions[0].module))
    if callable(getattr(model, PROPOSAL_LOSS, None)):
        supports.append(MeanOfStreams(model, plan.insertions[0].module, PROPOSAL_LOSS))
    whole = [model.get_submodule(name) for name in parent_paths(opener)]
    return supports + [
        ForbidPartialForward(part, "forward", plan.input_hook)
        for part in whole
        if "pixel_values" in argument_names(type(part).forward)
    ]


def _move_beside(module: nn.Module, parts: Sequence[nn.Module]) -> None:
    """To the device and precision of the first of the parts that has weights: those of one model may differ."""
    weights = (p for part in parts for p in part.parameters() if p.is_floating_point())
    weight = next(weights, torch.empty(0))
    module.to(device=weight.device, dtype=weight.dtype)
