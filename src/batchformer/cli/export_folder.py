"""A folder with the plain network of a run that timm or transformers load as their own, and a model card."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torchvision.transforms import v2

from batchformer.cli.export_network import Plain, answers_of, differ
from batchformer.cli.show import metrics_rows, name_of, weights_of
from batchformer.errors import UserError
from batchformer.files import TEMPORARY_SUFFIX, refuse_unwritable
from batchformer.recipes import about
from batchformer.runs.result import versions

_MARK = "<!-- written by batchformer export -->"
_KEPT = ("architecture", "fixed_input_size", "interpolation", "pool_size", "first_conv", "classifier")
_WEIGHTS, _CONFIG, _CARD = "model.safetensors", "config.json", "README.md"


def write_folder(found: Any, plain: Plain, out: Path, half: bool, license: str | None) -> tuple[str, list[str], float]:
    """Write it beside its place, load it as its user would, compare the outputs, then put it there in one step."""
    if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or _is_ours(out))):
        raise UserError(
            f"{out} was not written by this command and is not replaced: remove it, or choose another place."
        )
    refuse_unwritable(out / _CONFIG)
    place = out.with_name(f".{out.name}{TEMPORARY_SUFFIX}")
    shutil.rmtree(place, ignore_errors=True)
    try:
        place.mkdir(parents=True)
        library, code = _write_network(found, plain, place, half)
        with torch.inference_mode():
            loaded = _load(library, plain, place)
            difference = plain.difference(answers_of(loaded(*plain.inputs)), half, f"the folder, loaded by {library},")
        code = [line.replace("DIR", str(out)) for line in code]
        sentence = f"{library} loads it, and on {plain.inputs_are} its outputs {differ(difference)}."
        (place / _CARD).write_text(_card(found, plain, library, code, sentence, half, license), encoding="utf-8")
        if out.exists():
            shutil.rmtree(out)
        place.rename(out)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return sentence, code, difference


def _is_ours(folder: Path) -> bool:
    card = folder / _CARD
    return card.is_file() and _MARK in card.read_text(encoding="utf-8", errors="replace")


def _write_network(found: Any, plain: Plain, place: Path, half: bool) -> tuple[str, list[str]]:
    """Weights and config.json; returns the library that loads them and the lines of code that do."""
    from safetensors.torch import save_file

    network: Any = plain.network
    weights = {name: t.half() if half and t.is_floating_point() else t for name, t in network.state_dict().items()}
    labels = [str(name) for name in found.task.data_info.get("classes", ())]
    if type(network).__module__.startswith("transformers."):
        network.config.id2label = dict(enumerate(labels))
        network.config.label2id = {name: label for label, name in enumerate(labels)}
        network.save_pretrained(place, state_dict=weights)
        kind = type(network).__name__
        return "transformers", [f"from transformers import {kind}", f"model = {kind}.from_pretrained('DIR')"]
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, place / _WEIGHTS, plain.metadata)
    if _is_of_timm(found, network):
        _write_timm_config(found, network, place / _CONFIG, labels)
        return "timm", ["import timm", "model = timm.create_model('local-dir:DIR', pretrained=True)"]
    built = {"architecture": plain.metadata.get("backbone", ""), "code": f"{plain.imports}; model = {plain.call}"}
    config = {**built, "num_classes": len(labels), "label_names": labels, "image_size": _size(found.data)}
    (place / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    loads = f"model.load_state_dict(load_file('DIR/{_WEIGHTS}'))"
    return "batchformer", [f"{plain.imports}; model = {plain.call}", "from safetensors.torch import load_file", loads]


def _is_of_timm(found: Any, network: nn.Module) -> bool:
    """Whether timm makes this network by the name of its backbone: same class, same names and shapes of weights."""
    import timm

    name = getattr(found.task, "backbone", "")
    if not timm.is_model(name) or not type(network).__module__.startswith("timm."):
        return False
    arguments = {key: v for key, v in found.task.backbone_args.items() if not key.startswith("pretrained")}
    stock = timm.create_model(name, num_classes=network.num_classes, **arguments)
    own, expected = ({key: t.shape for key, t in each.state_dict().items()} for each in (network, stock))
    kinds = ([type(module) for module in each.modules()] for each in (network, stock))
    return own == expected and next(kinds) == next(kinds)


def _write_timm_config(found: Any, network: Any, file: Path, labels: list[str]) -> None:
    from timm.models._hub import save_config_for_hf

    data, before = found.data, network.pretrained_cfg
    seen: dict[str, Any] = {"input_size": (3, _size(data), _size(data)), "num_classes": network.num_classes}
    for name in ("mean", "std"):
        if getattr(data, name, None) is not None:
            seen[name] = tuple(float(value) for value in getattr(data, name))
    kept = {key: before[key] for key in _KEPT if key in before}  # the rest is about the weights of timm
    network.pretrained_cfg = {**kept, **seen, **_crop(data)}
    arguments = {key: v for key, v in found.task.backbone_args.items() if not key.startswith("pretrained")}
    try:
        save_config_for_hf(network, cast(Any, file), {"label_names": labels}, arguments or None)
    finally:
        network.pretrained_cfg = before


def _crop(data: Any) -> dict[str, Any]:
    """How evaluation resizes and crops, in timm's terms."""
    resizes = [step for step in _steps(data.predict_transform) if isinstance(step, v2.Resize)]
    if not resizes:
        return {"crop_pct": 1.0}
    resize = resizes[-1]
    squash = len(resize.size) == 2
    crop = {"crop_pct": _size(data) / resize.size[0], "crop_mode": "squash" if squash else "center"}
    return {**crop, "interpolation": v2.InterpolationMode(resize.interpolation).value}  # by default it is a text


def _steps(transform: Any) -> Iterator[Any]:
    """The steps of a transform, and of the compositions in it."""
    for step in getattr(transform, "transforms", [transform]):
        yield from _steps(step) if isinstance(step, v2.Compose) else [step]


def _load(library: str, plain: Plain, place: Path) -> nn.Module:
    """The network as a user of the library loads it."""
    if library == "timm":
        import timm

        return timm.create_model(f"local-dir:{place}", pretrained=True).eval()
    if library == "transformers":
        return type(plain.network).from_pretrained(place, dtype=torch.float32).eval()  # type: ignore[attr-defined]
    from safetensors.torch import load_file

    plain.network.load_state_dict(load_file(place / _WEIGHTS))
    return plain.network


def _size(data: Any) -> int | None:
    return getattr(data, "image_size", None)


def _card(found: Any, plain: Plain, library: str, code: list[str], proof: str, half: bool, license: str | None) -> str:
    """README.md as model hubs show it: data, measures, command, licence."""
    result, config = found.folder.read_result() or {}, found.config
    recipe, data = config["run"]["recipe"], result.get("data", {})
    try:
        title = about(recipe).title
    except UserError:  # a recipe of the user's own, which may have another name by now
        title = recipe
    task = "object-detection" if library == "transformers" else "image-classification"
    front = {"library_name": library, "pipeline_tag": task, "license": license or "unknown"}
    classes = [str(name) for name in found.task.data_info.get("classes", ())]
    counts = found.task.data_info.get("class_counts", ())
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in front.items()), "tags: [batchformer]", "---"]
    lines += [_MARK, f"# {name_of(result) if result else recipe}", "", f"{title}.", "", "## Use", ""]
    lines += ["```python", *code, "```", "", f"Images of {_size(found.data)} x {_size(found.data)} pixels"]
    if plain.metadata.get("mean"):
        lines[-1] += f", normalised with mean {plain.metadata['mean']} and std {plain.metadata['std']}"
    lines[-1] += f"; the weights are {'float16' if half else 'float32'}."
    lines += ["", f"Checked when it was written: {proof}", "", "## Data", ""]
    lines += [f"- data set: `{config['data']['class_path'].rpartition('.')[2]}`"]
    lines += [f"- {words}: {data[key]}" for key, words in (("train_images", "training images"), ("test_images", "test "
              "images"), ("fingerprint", "fingerprint of the files")) if key in data]  # fmt: skip
    if classes:
        listed = [f"{name} ({count})" for name, count in zip(classes, counts, strict=False)] or classes
        shown = listed[:20] + ([f"... and {len(listed) - 20} more"] if len(listed) > 20 else [])
        lines += [f"- {len(classes)} classes{' (training images)' if counts else ''}: {', '.join(shown)}"]
    lines += ["", "## Measures", ""]
    if result.get("metrics"):
        lines += ["| measure | value |", "|---|---|", *(f"| {a} | {b} |" for a, b in metrics_rows(result))]
        seen = "images that it was trained on" if data.get("evaluate_on") == "train" else "test images"
        when = weights_of(result)
        lines += ["", f"{when[0].upper()}{when[1:]}, on the {seen}; nothing was chosen by them."]
    else:
        lines += ["The run was not evaluated to its end."]
    lines += ["", "## Training", ""]
    if result.get("command"):
        lines += ["```console", f"$ {result['command']}", "```", ""]
    made = {**versions(), **result.get("versions", {})}
    lines += ["With " + ", ".join(f"{name} {number}" for name, number in made.items()) + "."]
    licence = f"{license}." if license else "none was given; the weights may be bound by the licences of the data."
    return "\n".join([*lines, "", "## Licence", "", licence, ""])
