"""How the runs were made: settings, versions, device, data, and the command that makes them again."""

from collections.abc import Mapping, Sequence
from typing import Any

from batchformer.report.comparison import DEFAULT_PAIR, compare_runs
from batchformer.report.runs import Run

_MOST_FINGERPRINTS = 3
_SETTINGS = {
    "model.detector": "detector",
    "model.backbone": "backbone",
    "model.algorithm": "algorithm",
    "model.algorithm.name": "algorithm",
    "model.loss.name": "loss",
    "model.stream_loss": "loss over the streams",
    "model.batchformer.variant": "variant",
    "model.batchformer.blocks": "after blocks",
    "model.batchformer.encoder_layers": "after encoder layers",
    "model.batchformer.mask_padding": "padding left out:",
    "model.batchformer.after": "after",
    "model.batchformer.share": "one module for all places:",
    "model.batchformer.streams": "streams",
    "model.batchformer.heads": "heads",
    "model.batchformer.layers": "layers",
    "model.batchformer.dropout": "dropout",
    "model.batchformer.norm": "norm",
    "model.batchformer.layer_scale": "layer scale",
    "model.batchformer.group_size": "group size",
    "model.mix.method": "mixing by",
    "model.mix.mixup": "mixup",
    "model.mix.cutmix": "CutMix",
    "model.mix.block": "attention of block",
    "model.mix.extractor": "extractor",
    "model.optimizer.lr": "learning rate",
    "model.optimizer.module_lr_factor": "factor for the module",
    "model.optimizer.weight_decay": "weight decay",
    "model.schedule.name": "schedule",
    "data.batch_size": "batch size",
    "data.imbalance": "imbalance",
    "data.image_size": "image size",
    "data.augment": "augmentation",
    "trainer.precision": "precision",
}
_OF_THE_MODULE = ("model.batchformer.", "model.stream_loss", "model.optimizer.module_lr_factor")
# options that one way of mixing reads and the others do not, and those that one does not read
_OF_A_MIX = {"model.mix.block": "transmix", "model.mix.extractor": "attentive-cutmix"}
_NOT_OF_A_MIX = {"model.mix.mixup": "cutmix", "model.mix.cutmix": "mixup"}
# settings that a method of long-tailed recognition does not read
_NOT_OF_AN_ALGORITHM = {
    "crt": ("model.loss.",),
    "lws": ("model.loss.", *_OF_THE_MODULE),
    "tau_norm": ("model.loss.", *_OF_THE_MODULE, "model.optimizer.", "model.schedule."),
}
_MAY_DIFFER = ("seed", "method", "target", "root", "out", "dir", "name", "version", "workers", "seed_everything",
               "recipe", "detector_from")  # fmt: skip
_MAY_DIFFER_BELOW = ("run.variant", "run.init_from")


def facts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Facts about the runs, as (name, value); unknown values are left out."""
    run = representative_run(runs)
    settings = flatten(run.raw.get("config"))
    if not has_module(run):
        settings = {key: value for key, value in settings.items() if not key.startswith(_OF_THE_MODULE)}
    unread = (*_unread_of_the_mix(settings), *_NOT_OF_AN_ALGORITHM.get(settings.get("model.algorithm", ""), ()))
    settings = {key: value for key, value in settings.items() if not key.startswith(unread)}
    chosen = [
        f"{name} {settings[key]}"
        for key, name in _SETTINGS.items()
        if settings.get(key) not in (None, "None", "null", "plain")
    ]
    data = _part(run, "data")
    images = [
        f"{data[key]:,} {word} images"
        for key, word in (("train_images", "training"), ("test_images", "test"))
        if isinstance(data.get(key), int)
    ]
    found = {
        "Recipe": run.recipe,
        "Settings": ", ".join(chosen),
        "Targets": ", ".join(dict.fromkeys(run.target for run in runs if run.target is not None)),
        "Seeds": "; ".join(f"{variant}: {seeds}" for variant in _variants(runs) if (seeds := _seeds(runs, variant))),
        "Protocol": ", ".join(
            "numbers of the last epoch, never the best one" if name == "last" else name for name in _protocols(runs)
        ),
        "Length": ", ".join(
            f"{run.raw[key]:,} {key if run.raw[key] != 1 else key[:-1]}"
            for key in ("epochs", "steps")
            if isinstance(run.raw.get(key), int)
        ),
        "Data": ", ".join(images),
        "Data fingerprint": _fingerprints(runs),
        "Device": _joined(runs, lambda r: r.text("device")),
        "Wall time per run": _range(runs, "wall_s", " s"),
        "Throughput": _range(runs, "images_per_s", " images/s"),
        "Versions": ", ".join(f"{name} {version}" for name, version in _part(run, "versions").items()),
    }
    return [(question, answer) for question, answer in found.items() if answer]


def representative_run(runs: Sequence[Run]) -> Run:
    """The run whose settings are shown for all: of a variant other than the reference, where there is one."""
    others = _variants(runs)[1:]
    return next((run for run in runs if run.variant in others), runs[0])


def has_module(run: Run) -> bool:
    """Whether the run trained with the module: its settings say so, else its name."""
    return flatten(run.raw.get("config")).get("model.method", run.variant) != DEFAULT_PAIR[0]


def _variants(runs: Sequence[Run]) -> tuple[str, ...]:
    return compare_runs([run.raw for run in runs]).variants


def _unread_of_the_mix(settings: Mapping[str, str]) -> tuple[str, ...]:
    """Prefixes of the options that the chosen mixing does not read; all of them where nothing is mixed."""
    method = settings.get("model.mix.method")
    idle = [
        alpha for alpha, other in _NOT_OF_A_MIX.items() if method == other or settings.get(alpha, "0.0") in ("0", "0.0")
    ]
    if len(idle) == len(_NOT_OF_A_MIX):
        return ("model.mix.",)
    return (*idle, *(option for option, owner in _OF_A_MIX.items() if owner != method))


def caveats(runs: Sequence[Run]) -> list[str]:
    """Warnings about the comparison: anything that differs between the runs and should not."""
    found = []
    if {run.variant for run in runs} <= set(DEFAULT_PAIR):
        if keys := differing(runs):
            found.append(f"The runs differ in more than method and seed: {', '.join(keys)}{as_variants(runs, keys)}.")
    else:  # variants differ on purpose: only runs of the same one must have equal settings
        for variant in _variants(runs):
            if keys := differing([run for run in runs if run.variant == variant]):
                found.append(f"Runs of {variant} differ in more than target and seed: {', '.join(keys)}.")
    for key, word in (("device", "device"), ("versions", "versions"), ("epochs", "number of epochs")):
        if len({str(run.raw.get(key)) for run in runs}) > 1:
            found.append(f"The {word} is not the same in all runs.".replace("versions is", "versions are"))
    # what is held out of the domains that are not the target depends on the seed
    trained_on = {
        ((run.target, run.seed if run.target else None), str(_part(run, "data").get("fingerprint")), *run.class_counts)
        for run in runs
    }
    if len(trained_on) > len({place for place, *_ in trained_on}):
        found.append("The training data are not the same in all runs (their fingerprints or class counts differ).")
    with_it, without = ({loss_factor(run) for run in runs if has_module(run) == module} for module in (True, False))
    if with_it and without and with_it != without:
        found.append(
            "With BatchFormer the loss is three times the mean over the streams (stream_loss released), which trains "
            "like a threefold learning rate, and the baseline's loss is not scaled: part of a difference may be that. "
            "The control is --method baseline --model.loss_weight 3."
        )
    if any(flatten(run.raw.get("config")).get("data.evaluate_on") == "train" for run in runs):
        found.append(
            "Evaluated on the images trained on: it shows that the network learns them, and nothing about others."
        )
    if odd := [name for name in _protocols(runs) if name != "last"]:
        found.append(f"Not all numbers are those of the last epoch (protocol: {', '.join(odd)}).")
    return found


def as_variants(runs: Sequence[Run], keys: Sequence[str]) -> str:
    """How to compare runs that differ in these settings; empty where they differ by their version or trainer alone."""
    settings = [flatten(run.raw.get("config")) for run in runs]
    everywhere = [key for key in keys if all(key in each for each in settings)]
    chosen = [key for part in ("model.", "data.") for key in everywhere if key.startswith(part)]
    return f"; to compare them, train them as variants: --variant NAME:{chosen[0]}=VALUE" if chosen else ""


def differing(runs: Sequence[Run]) -> list[str]:
    """Settings that are not the same in all runs they matter to: a baseline has no module to be set."""
    found = []
    settings = [(has_module(run), flatten(run.raw.get("config"))) for run in runs]
    for key in sorted({key for _, each in settings for key in each}):
        of_module = key.startswith(_OF_THE_MODULE)
        values = {each.get(key) for module, each in settings if each and (module or not of_module)}
        may = key.rsplit(".", 1)[-1] in _MAY_DIFFER or key.startswith(_MAY_DIFFER_BELOW)
        if not may and len(values) > 1:
            found.append(key)
    return found


def loss_factor(run: Run) -> float:
    """The factor between the loss of a run and the mean over its rows."""
    settings = flatten(run.raw.get("config"))
    two_streams = settings.get("model.method") == "batchformer" and (
        settings.get("model.batchformer.streams", "duplicate") == "duplicate"
    )
    released = 3.0 if two_streams and settings.get("model.stream_loss") == "released" else 1.0
    return released * float(settings.get("model.loss_weight", 1.0))


def knows_its_command(runs: Sequence[Run]) -> bool:
    """Whether the runs recorded their command; results of earlier versions did not."""
    return all(run.text("command") is not None for run in runs)


def command(runs: Sequence[Run]) -> str:
    """The command that trains these runs again; without changed fields where the runs did not record it.

    DIR stands for the path of the data.
    """
    root = flatten(runs[0].raw.get("config")).get("data.root", "None")
    place = "" if root in ("None", "data") else " --data-root DIR"
    lines = _commands(runs).split("\n")
    return "\n".join(line if ".root " in line or "--data-root " in line else line + place for line in lines)


def _commands(runs: Sequence[Run]) -> str:
    if knows_its_command(runs):
        return "\n".join(dict.fromkeys(str(run.text("command")) for run in runs))
    recipe, seeds = runs[0].recipe, sorted({run.seed for run in runs})
    counted = seeds == list(range(len(seeds)))
    variants = {run.variant for run in runs}
    if (variants == set(DEFAULT_PAIR) and (counted or len(seeds) > 1)) or not variants <= set(DEFAULT_PAIR):
        return f"batchformer compare {recipe} --seeds {len(seeds) if counted else ' '.join(map(str, seeds))}"
    return "\n".join(f"batchformer fit {recipe} --method {run.variant} --seed {run.seed}" for run in runs)


def flatten(config: Any, prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted keys; `init_args` levels of class settings are left out of the names."""
    if not isinstance(config, Mapping):
        return {prefix: str(config)} if prefix else {}
    flat: dict[str, str] = {}
    for key, value in config.items():
        name = prefix if key == "init_args" and prefix else f"{prefix}.{key}" if prefix else str(key)
        flat.update(flatten(value, name))
    return flat


def _part(run: Run, key: str) -> Mapping[str, Any]:
    value = run.raw.get(key)
    return value if isinstance(value, dict) else {}


def _seeds(runs: Sequence[Run], variant: str) -> str:
    return ", ".join(map(str, sorted({run.seed for run in runs if run.variant == variant})))


def _protocols(runs: Sequence[Run]) -> list[str]:
    return sorted({run.text("protocol") or "unknown" for run in runs})


def _joined(runs: Sequence[Run], part: Any) -> str:
    return ", ".join(dict.fromkeys(str(part(run)) for run in runs if part(run) is not None))


def _fingerprints(runs: Sequence[Run]) -> str:
    """Of every training set; how many there are where every target and seed has its own."""
    found = dict.fromkeys(str(f) for run in runs if (f := _part(run, "data").get("fingerprint")) is not None)
    return ", ".join(found) if len(found) <= _MOST_FINGERPRINTS else f"{len(found)}, of the targets and seeds"


def _range(runs: Sequence[Run], key: str, unit: str) -> str:
    values = [
        run.raw[key] for run in runs if isinstance(run.raw.get(key), int | float) and run.raw[key] == run.raw[key]
    ]
    if not values:
        return ""
    low, high = f"{min(values):,.0f}", f"{max(values):,.0f}"
    return (low if low == high else f"{low} to {high}") + unit
