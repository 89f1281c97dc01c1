"""``batchformer probe RUN``: train a linear classifier on the frozen backbone of a run, or fine-tune it."""

from pathlib import Path
from typing import Any

from batchformer.cli.arguments import Option, read_arguments
from batchformer.cli.training import ALIASES
from batchformer.errors import UserError, did_you_mean
from batchformer.files import refuse_to_replace, write_text
from batchformer.runs.folder import RunFolder

HELP = """
batchformer probe RUN [--protocol moco-v2|moco-v3|mae|finetune] [--labels 0.01] [options] [--key value ...]

Evaluate the backbone of a pre-training run: train a linear classifier on its frozen features, or fine-tune all weights.

  --protocol NAME   moco-v2: SGD, learning rate 30, 100 epochs; moco-v3 (default): SGD, 0.1 per 256 images, 90 epochs;
                    mae: LARS, BatchNorm before the classifier, 90 epochs; finetune: all weights, AdamW, 100 epochs
  --labels PART     use only this fraction of the training labels (0.01 or 0.1), drawn by class and seed
  --seed N          seed of the probe (default: that of the run)
  --out DIR         run folder (default: RUN-probe); the trained recipe is written next to it as DIR.yaml
  --data-root, --epochs, --lr, --batch-size, --device, --logger, --resume, --overwrite, --no-analysis,
                    --print-config and any field (--model.optimizer.lr 10) as in fit
  --trust           import classes outside this package that the run folder names; only if you know where it comes from

A timm network or a file needs no run: batchformer fit linear-probe --model.backbone resnet50 --init-from FILE
"""

_STEPS = {"name": "step", "milestones": [60, 80]}
PROTOCOLS: dict[str, dict[str, Any]] = {
    "moco-v2": {"epochs": 100, "model": {"optimizer": {"lr": 30.0}, "schedule": _STEPS}},
    "moco-v3": {"epochs": 90, "model": {"optimizer": {"lr": 0.1}, "schedule": {"name": "cosine"}}},
    "mae": {
        "epochs": 90,
        "model": {
            "batch_norm": True,
            "optimizer": {"name": "lars", "lr": 0.1},
            "schedule": {"name": "cosine", "warmup_epochs": 10, "warmup_start": 0.1},
        },
    },
    "finetune": {
        "epochs": 100,
        "task": "classification",
        "model": {
            "method": "baseline",
            "optimizer": {"lr": 5.0e-4, "lr_per": 256, "weight_decay": 0.05},
            "schedule": {"warmup_epochs": 5},
        },
    },
}
_PASSED_ON = (  # to fit
    *(Option(name) for name in ("seed", "data-root", *ALIASES, "device")),
    *(Option(name, "nothing") for name in ("resume", "overwrite", "no-analysis", "print-config")),
    Option("logger", "repeated"),
)
_FIRST_LINE = "# Written by batchformer probe.\n"
#: options of pre-training that a probe does not have; its images are seen once
_LEFT_OUT = ("views", "augment_repeats")


def run(args: list[str]) -> int:
    own = [*map(Option, ("protocol", "labels", "out")), Option("trust", "nothing")]
    given = read_arguments(args, [*_PASSED_ON, *own], recipe_keys=True)
    if len(given.positional) != 1:
        raise UserError("probe needs one run folder: batchformer probe runs/mae-digits/batchformer-seed0")
    protocol = given.value("protocol") or "moco-v3"
    if protocol not in PROTOCOLS:
        raise UserError(
            f"--protocol {protocol}: expected one of {', '.join(PROTOCOLS)}.{did_you_mean(protocol, PROTOCOLS)}"
        )
    folder = RunFolder(Path(given.positional[0]))
    folder.require()
    recipe = recipe_of_probe(folder, protocol, given.value("labels"))

    import yaml

    from batchformer.cli import fit
    from batchformer.cli.recipe_cli import refuse_code_of_others

    if not given.flag("trust"):
        refuse_code_of_others(recipe["task"], recipe, folder.config)
    out = given.value("out") or f"{folder.path}-{'finetune' if protocol == 'finetune' else 'probe'}"
    name = f"{recipe['run'].pop('recipe')}-{protocol}"
    words = [word for key, value in given.recipe_keys for word in (f"--{key}", value)]
    for option in _PASSED_ON:
        for value in given.values.get(option.name, []) or [""] * given.flag(option.name):
            words += [f"--{option.name}", *([value] if value else [])]
    file, config = Path(f"{out}.yaml"), RunFolder(Path(out)).config
    refuse_to_replace(file, lambda content: content.startswith(_FIRST_LINE.encode()))
    recipe_before, config_before = _text(file), _text(config)
    write_text(file, _FIRST_LINE + yaml.safe_dump(recipe, sort_keys=False))
    try:
        return fit.run([str(file), "--name", name, "--out", out, *words])
    finally:
        # refused, or only printed: the recipe beside the folder stays that of the run in it
        if _text(config) == config_before and recipe_before != _text(file):
            file.unlink() if recipe_before is None else write_text(file, recipe_before)


def _text(file: Path) -> str | None:
    return file.read_text(encoding="utf-8") if file.is_file() else None


def recipe_of_probe(folder: RunFolder, protocol: str, labels: str | None) -> dict[str, Any]:
    """The recipe that probes a run: its backbone and its data, trained by the protocol."""
    import yaml

    from batchformer.runs.result import variant_of

    config: dict[str, Any] = yaml.safe_load(folder.config.read_text(encoding="utf-8"))
    model, data, chosen = config["model"], config["data"], PROTOCOLS[protocol]
    if "backbone" not in model:
        raise UserError(f"{folder.path} is of a task without a backbone: probe a run of mae, moco or a classifier.")
    task = chosen.get("task", "linear_probe")
    # papers fine-tune on stronger augmentation, which is that of the data, and train linear classifiers on regions
    left_out = _LEFT_OUT if task == "linear_probe" else (*_LEFT_OUT, "augment")
    arguments = {k: v for k, v in (data.get("init_args") or {}).items() if k not in left_out and v is not None}
    probed: dict[str, Any] = {
        "backbone": model["backbone"],
        "backbone_args": model.get("backbone_args") or {},
        "seed": model.get("seed", 0),
    }
    if labels is not None:
        if task != "linear_probe":
            raise UserError("--labels goes with a linear probe: leave out --protocol finetune.")
        try:
            probed["labels"] = float(labels)
        except ValueError:
            raise UserError(f"--labels {labels}: expected a part of the labels above 0, up to 1.") from None
    trainer = {key: config["trainer"][key] for key in ("precision", "accelerator") if config["trainer"].get(key)}
    return {
        "task": task,
        "trainer": {**trainer, "max_epochs": chosen["epochs"], "check_val_every_n_epoch": 1},
        "model": {**probed, **chosen["model"]},
        "data": {"class_path": data["class_path"], "init_args": arguments},
        "run": {
            "recipe": config["run"].get("recipe", "run"),
            "variant": variant_of(config),  # so that probes with and without the module are compared
            "reference": config["run"].get("reference", "baseline"),
            "init_from": {"network": str(folder.path)},
            "threads": config["run"].get("threads"),
            "code": config["run"].get("code"),
        },
    }
