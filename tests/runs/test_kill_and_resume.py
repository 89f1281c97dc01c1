"""A run killed with SIGKILL at any moment and resumed ends with the same bits as one never killed.

One that is asked to stop says how to go on.
"""

import csv
import json
import signal

import pytest
import torch

from batchformer.cli import main

from ..selection import others_slow
from .die_at import ends_of

# 490 training images in batches of 64 are 7 steps an epoch: step 13 is the last but one of the second epoch.
THREE_EPOCHS = ["--trainer.max_epochs", "3", "--trainer.check_val_every_n_epoch", "2", "--no-analysis"]
DIGITS = ("digits-lt",)
VALIDATED_INSIDE = ("digits-lt", "--trainer.val_check_interval", "4")
# AdamW, mixing, averaged weights, a learning rate for every step, and the losses of both streams
VIT = ("vit-digits", "--data.imbalance", "20", "--model.mix.mixup", "0.5", "--model.mix.cutmix", "1",
       "--model.ema", "0.9", "--model.backbone_args.depth", "2", "--model.batchformer.blocks", "[0,1]")  # fmt: skip
PACO = ("digits-lt", "--model.algorithm", "paco")
# What is drawn in an epoch follows probabilities that are learnt, and are others when a checkpoint inside it is written
BALMS = ("digits-lt", "--model.algorithm", "balms", "--model.balms.meta_batch", "64")
# critic and generator in turn, gradients summed over an epoch, a classifier that is trained when it is evaluated
GAN = ("digits-gzsl", "--trainer.limit_train_batches", "7", "--model.generator.critic_steps", "3",
       "--model.softmax.epochs", "2", "--model.contrast.accumulate_comparator", "true")  # fmt: skip
GUIDED_GAN = (*GAN[:-2], "--model.algorithm", "f_clswgan", "--model.method", "baseline")
# The margins of an epoch follow word vectors that are learnt, and are others when a checkpoint inside it is written
OPEN_WORLD = ("digits-states", "--trainer.limit_train_batches", "7", "--model.backbone_args.widths", "[4,4]",
              "--model.pairs.name", "compcos", "--model.pairs.world", "open")  # fmt: skip
EACH_EPOCH = ["--run.checkpoint_every_epochs", "1"]
INSIDE_EPOCHS = ["--run.checkpoint_every_steps", "3"]
ENDS_BY_STEPS = ["--trainer.max_steps", "18"]
# What the run keeps, where it dies, and the step of the checkpoint that must be there then.
KILLS = {
    "in the middle of an epoch, checkpoint inside it": (DIGITS, INSIDE_EPOCHS, "step", 13, 12),
    "in the middle of an epoch, checkpoint at the end of the one before": (DIGITS, EACH_EPOCH, "step", 10, 7),
    "in the middle of writing a checkpoint inside an epoch": (DIGITS, INSIDE_EPOCHS, "write", 4, 9),
    "in the middle of writing the checkpoint of the last epoch": (DIGITS, EACH_EPOCH, "write", 3, 14),
    "before the first checkpoint": (DIGITS, EACH_EPOCH, "step", 5, None),
    "in a run that ends by its steps": (DIGITS, [*EACH_EPOCH, *ENDS_BY_STEPS], "step", 10, 7),
    "after a validation inside the epoch, checkpoint behind it": (VALIDATED_INSIDE, INSIDE_EPOCHS, "step", 13, 12),
    "ViT, in the middle of an epoch, checkpoint inside it": (VIT, INSIDE_EPOCHS, "step", 13, 12),
    "BALMS, in the middle of an epoch, checkpoint inside it": (BALMS, INSIDE_EPOCHS, "step", 13, 12),
    "BALMS, in the middle of an epoch, checkpoint at the end of the one before": (BALMS, EACH_EPOCH, "step", 10, 7),
    "ViT, in the middle of writing the checkpoint of the last epoch": (VIT, EACH_EPOCH, "write", 3, 14),
    "PaCo with its queue, in the middle of an epoch, checkpoint inside it": (PACO, INSIDE_EPOCHS, "step", 13, 12),
    "GAN, between steps of critic and generator, checkpoint inside the epoch": (
        GAN,
        INSIDE_EPOCHS,
        "step",
        13,
        12,
    ),
    "GAN, in the middle of writing the checkpoint of the last epoch": (GAN, EACH_EPOCH, "write", 3, 14),
    "GAN guided by a classifier, in the middle of an epoch": (GUIDED_GAN, INSIDE_EPOCHS, "step", 10, 9),
    "pairs in the open world, in the middle of an epoch, checkpoint inside it": (
        OPEN_WORLD,
        INSIDE_EPOCHS,
        "step",
        13,
        12,
    ),
}

# Signals to the process group, as a terminal and job schedulers send them: worker processes get them too.
WORKERS = ["--data.on_device", "false", "--data.workers", "2"]
STOPS = {
    "SIGTERM, before the training": ("before", signal.SIGTERM),
    "SIGTERM, while a batch is loaded": ("load", signal.SIGTERM),
    "SIGTERM, which a worker gets first": ("worker", signal.SIGTERM),
    "Ctrl-C, while workers start": ("start", signal.SIGINT),
}

# The rest is slow: the same mechanisms met in another order.
FAST = [
    "in the middle of an epoch, checkpoint inside it",
    "in the middle of writing the checkpoint of the last epoch",
    "before the first checkpoint",
    "ViT, in the middle of an epoch, checkpoint inside it",
    "BALMS, in the middle of an epoch, checkpoint inside it",
    "GAN, between steps of critic and generator, checkpoint inside the epoch",
]


@pytest.fixture(scope="module")
def killed(request, tmp_path_factory):
    chosen = {item.callspec.params["name"] for item in request.session.items if item.path == request.path}
    folders = {name: tmp_path_factory.mktemp("killed") / "run" for name in [*KILLS, *STOPS] if name in chosen}
    how = {name: (where, number, recipe, options) for name, (recipe, options, where, number, _) in KILLS.items()}
    how |= {name: (where, number, DIGITS, WORKERS) for name, (where, number) in STOPS.items()}
    cases = []
    for name, out in folders.items():
        where, number, recipe, options = how[name]
        cases.append((where, number, ["fit", *recipe, *THREE_EPOCHS, *options, "--out", str(out)]))
    ends = ends_of(cases, tmp_path_factory.mktemp("ends"))
    return {name: (out, *end) for (name, out), end in zip(folders.items(), ends, strict=True)}


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory):
    made = {}

    def run(*words):
        if words not in made:
            made[words] = tmp_path_factory.mktemp("unbroken") / "run"
            assert main(["fit", *words, *THREE_EPOCHS, *EACH_EPOCH, "--out", str(made[words])]) == 0
        return made[words]

    return run


@pytest.mark.parametrize("name", others_slow(KILLS, FAST))
def test_resumed_run_has_the_bits_of_one_never_killed(name, killed, never_killed):
    recipe, options, where, _, step = KILLS[name]
    by_steps = ENDS_BY_STEPS[0] in options
    unbroken = never_killed(*recipe, *(ENDS_BY_STEPS if by_steps else ()))
    out, code, said = killed[name]
    assert code == -signal.SIGKILL, said
    checkpoint = out / "checkpoints/last.ckpt"
    assert not (out / "result.json").exists()
    assert (out / "run.lock").is_file()  # of a process that is gone: no reason not to go on
    assert bool(list(out.rglob("*.partial"))) == (where == "write")
    assert checkpoint.exists() == (step is not None)
    if step is not None:
        assert torch.load(checkpoint, weights_only=True)["global_step"] == step

    assert main(["fit", *recipe, *THREE_EPOCHS, *options, "--out", str(out), "--resume"]) == 0

    expected, found = (torch.load(p / "checkpoints/last.ckpt", weights_only=True) for p in (unbroken, out))
    assert found["global_step"] == expected["global_step"] == (18 if by_steps else 21)
    _assert_same(found["state_dict"], expected["state_dict"])
    _assert_same(found["optimizer_states"], expected["optimizer_states"])
    results = [json.loads((p / "result.json").read_text()) for p in (unbroken, out)]
    for key in ("metrics", "per_class", "history", "streams", "epochs", "steps", "data"):
        assert results[1].get(key) == results[0].get(key), key
    if recipe is VIT:
        assert any(key.startswith("ema.") for key in found["state_dict"])
        assert [len(losses) for losses in results[0]["streams"].values()] == [3, 3]
    if recipe is PACO:
        assert {"algorithm.queue.keys", "algorithm.queue.position"} <= found["state_dict"].keys()
        assert any(key.startswith("algorithm.key_net.") for key in found["state_dict"])
    assert _rows(out) == _rows(unbroken)
    assert not list(out.rglob("*.partial"))
    assert not (out / "run.lock").exists()


@pytest.mark.parametrize("name", STOPS)
def test_a_stopped_run_says_how_to_go_on_and_nothing_else(name, killed):
    out, code, said = killed[name]
    *progress, told = said.splitlines()
    assert code == 130, said
    assert told.startswith("batchformer: stopped; resume with: ")
    assert told.endswith(f"--out {out} --resume")
    assert not [line for line in progress if "epoch" not in line]
    assert not (out / "run.lock").exists()


def _assert_same(found, expected):
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            _assert_same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            _assert_same(one, other)
    else:
        assert found == expected


def _rows(run):
    with open(run / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))
