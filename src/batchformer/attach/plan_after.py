"""Where BatchFormerV2 goes: the plan behind `attach(after=...)`, made from dry runs that leave no state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

from torch import nn

from batchformer.attach.after import After
from batchformer.attach.classifiers import get_submodule
from batchformer.attach.dry_run import Example
from batchformer.attach.entry import Entry, WholeOnly
from batchformer.attach.feature import Channels, Feature, feature_of_output, is_signal, known_layout
from batchformer.attach.insertion import InstanceForward
from batchformer.attach.padding import LayerPadding, argument_names, takes_padded_images
from batchformer.attach.plan import Plan
from batchformer.attach.plan_checks import IMAGES, check_apart, check_read, in_place, rows_double
from batchformer.attach.point import move_beside
from batchformer.attach.separate_norm import BatchNormMode, separate_norms
from batchformer.attach.stream_loss import PROPOSAL_LOSS, MeanOfStreams
from batchformer.attach.watch import View, check_batch_first, grown, parents, views, watch
from batchformer.attach.wide import make_wide
from batchformer.errors import UserError
from batchformer.nn.batchformer_v2 import BatchFormerV2


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
        f"{type(model).__name__} has no blocks in a well-known place: name them with after=[paths]; its parts are "
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
        raise UserError(f"{type(model).__name__} has no encoder.layers: name the places with after=[paths].")
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
class _Place:
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
) -> Plan:
    """The insertions, then what lets both streams through the model around them; each step is tried in dry runs."""
    places = _places(model, paths)
    paddings = {place: LayerPadding(place.layer, place.path) for place in places} if mask_padding else {}
    looks = views(model, example)
    seen = looks[0].two
    features = {place: _feature(model, place, looks[0], dim, channels) for place in places}
    looks = [look for look in looks if all(place.name in look.two for place in places)]
    places.sort(key=lambda place: seen[place.name].begins[0])
    if share and len(set(features.values())) > 1:
        raise UserError("share=True needs outputs of one width and layout at all places: attach them with share=False.")
    insertions: list[After] = []
    for place in places:
        feature = features[place]
        module = (
            insertions[0].module
            if share and insertions
            else BatchFormerV2(feature.dim, channels=feature.channels, **keywords)
        )
        move_beside(module, [place.layer, model])  # before the model runs with it
        insertions.append(
            After(
                place.layer,
                module,
                opens=not insertions,
                padding=paddings.get(place),
                is_signal=is_signal(seen[place.name], feature),
            )
        )
    opener, first = places[0].name, insertions[0].module
    plan = Plan([place.path for place in places], insertions, Entry(model, first), example)
    padded = takes_padded_images(model)  # a detector: masks and positions are made before the insertion
    if padded:
        for insertion in insertions:
            insertion.entry = plan.entry
    if first.streams == "duplicate":
        if padded or not all(rows_double(model, plan, look.training)[0] for look in looks):
            make_wide(model, plan, opener, looks)
        if padded:
            plan.supports += _detector_supports(model, plan, opener)
        apart = ("forward_intermediates", "forward_features") if plan.entry.wide else ("forward_intermediates",)
        plan.supports += [WholeOnly(model, name, plan.entry) for name in apart if hasattr(type(model), name)]
    if not padded:
        check_read(model, plan, [place.path for place in places if seen[place.name].gives_several])
    behind = [name for look in looks for name in _norms_behind(model, plan, opener, look, batch_norm)]
    plan.supports += separate_norms(model, first, dict.fromkeys(behind), batch_norm)
    if first.streams == "duplicate" and batch_norm == "separate" and not padded:
        check_apart(model, plan)
    return plan


def _places(model: nn.Module, paths: Sequence[str]) -> list[_Place]:
    if not paths:
        raise UserError("after=[] names no place: name a submodule.")
    first_names = {module: name for name, module in model.named_modules()}
    layers = [_last_called(get_submodule(model, path)) for path in paths]
    if len(set(layers)) < len(layers):
        raise UserError("after= names one submodule twice: name each place once.")
    return [_Place(path, first_names[layer], layer) for path, layer in zip(paths, layers, strict=True)]


def _feature(model: nn.Module, place: _Place, look: View, dim: int | None, channels: Channels | None) -> Feature:
    """Width and layout of what leaves the place, which must be called once and give a row for each image."""
    path, calls = place.path, look.two.get(place.name)
    feature = feature_of_output(path, calls, dim, channels or known_layout(model, place.layer))
    assert calls is not None  # refused before
    if len(calls.begins) > 1:
        raise UserError(f"{path!r} is called {len(calls.begins)} times in a forward: name one called once.")
    check_batch_first(path, calls, look.three[place.name])
    return feature


def _norms_behind(model: nn.Module, plan: Plan, place: str, look: View, batch_norm: BatchNormMode) -> list[str]:
    """The submodules behind the insertion that both streams reach, BatchNorms among them.

    Being called later is not enough: a branch that leaves the model before the insertion (DeepLab's auxiliary head) has
    plain rows only. A dry run shows which get twice the rows; where it fails, all that are called later count.
    """
    first = plan.insertions[0].module
    names = look.called_after(place)
    if first.streams == "split":  # rows that are folded from several of an image cannot be told apart there
        names = [name for name in names if (0,) in look.batch_arguments(name)]
    if not separate_norms(model, first, names, batch_norm):
        return []
    try:
        with in_place(model, plan, streams="duplicate"):
            both = watch(model, IMAGES, plan.example, look.training)
    except UserError:
        return names
    reached = grown(look.two, both)
    return [name for name in names if name in reached]


def _last_called(module: nn.Module) -> nn.Module:
    """After a Sequential is after its last child; that one is called even where somebody runs the children one by one.

    (timm's ResNets do so under gradient checkpointing.)
    """
    while type(module).forward is nn.Sequential.forward and len(module._modules):
        module = module.get_submodule(list(module._modules)[-1])
    return module


def _detector_supports(model: nn.Module, plan: Plan, place: str) -> list[InstanceForward]:
    """The loss as the mean of both streams; models inside that would take half of the images for the second stream."""
    supports: list[InstanceForward] = []
    if callable(getattr(model, "loss_function", None)):
        supports.append(MeanOfStreams(model, plan.insertions[0].module))
    if callable(getattr(model, PROPOSAL_LOSS, None)):
        supports.append(MeanOfStreams(model, plan.insertions[0].module, PROPOSAL_LOSS))
    whole = [model.get_submodule(name) for name in parents(place)]
    return supports + [
        WholeOnly(part, "forward", plan.entry) for part in whole if "pixel_values" in argument_names(type(part).forward)
    ]
