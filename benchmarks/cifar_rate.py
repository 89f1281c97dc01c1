"""Training rate of the recipe `cifar100-lt-100` against a bare loop, side by side in one run.

    python -m benchmarks.cifar_rate --data-root DIR [--epochs 60] [--out benchmarks/results]

The bare loop is one CUDA graph of the same step (forward, backward, SGD of the attached, compiled ResNet-32 under bf16
autocast) replayed over augmented batches that already lie on the device: no loader, no augmentation, no logging. The
recipe's rate is what `batchformer fit` reports for itself: everything but validation and the first epoch.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

import batchformer as bf
from batchformer.cli import main as batchformer
from batchformer.data import CIFAR100LT
from batchformer.data.loading.epoch_loader import images_and_labels
from batchformer.losses import BalancedSoftmaxLoss
from batchformer.models import resnet32
from benchmarks._common import milliseconds, write
from benchmarks._layer_timing import graph_of

BATCH = 512


def bare_rate(root: str, method: str, channels_last: bool, compile: bool) -> float:
    """Images per second of the step alone."""
    data = CIFAR100LT(root=root, batch_size=BATCH, augment="autoaugment-cutout", channels_last=channels_last)
    data.setup()
    batches = [tuple(part.cuda() for part in images_and_labels(batch)) for batch in data.train_dataloader()]
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model: Any = resnet32(num_classes=data.num_classes)
    own: list[torch.nn.Parameter] = []
    if method == "batchformer":
        own = list(bf.attach(model).parameters())
    model = model.cuda().to(memory_format=layout).train()
    criterion = bf.TwoStreamLoss(BalancedSoftmaxLoss(data.class_counts).cuda(), scale="released")
    owned = {id(p) for p in own}
    groups: list[dict[str, Any]] = [{"params": [p for p in model.parameters() if id(p) not in owned]}]
    if own:
        groups.append({"params": own, "lr": torch.tensor(0.01, device="cuda")})
    optimizer = torch.optim.SGD(
        groups, lr=torch.tensor(0.1, device="cuda"), momentum=0.9, weight_decay=5e-4, fused=True
    )
    if compile:
        model.compile(dynamic=False)
    images, labels = (t.clone() for t in batches[0])

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()

    replay_graph = graph_of(step)
    stream = cycle(batches)

    def replay() -> None:
        source = next(stream)
        images.copy_(source[0])
        labels.copy_(source[1])
        replay_graph()

    replay()
    return 1e3 * BATCH / milliseconds(replay, repeats=200)


def recipe_rate(root: str, method: str, epochs: int, extra: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        overrides = ["--trainer.max_epochs", str(epochs), "--model.schedule.warmup_epochs", "5", "--out", str(out)]
        code = batchformer(
            ["fit", "cifar100-lt-100", "--data-root", root, "--method", method, "--no-analysis", *overrides, *extra]
        )
        if code:
            raise SystemExit(code)
        return json.loads((out / "result.json").read_text())["images_per_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--methods", nargs="+", default=["baseline", "batchformer"])
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--name", default="cifar_rate")
    args = parser.parse_args()
    flags = {True: "true", False: "false"}
    extra = ["--model.channels_last", flags[args.channels_last], "--data.channels_last", flags[args.channels_last]]
    extra += ["--model.compile", flags[not args.eager]]
    rows = []
    for method in args.methods:
        bare = bare_rate(args.data_root, method, args.channels_last, not args.eager)
        recipe = recipe_rate(args.data_root, method, args.epochs, extra)
        rows.append(
            {"method": method, "bare_images_per_s": bare, "recipe_images_per_s": recipe, "ratio": recipe / bare}
        )
        print(rows[-1], flush=True)
    settings = {"batch": BATCH, "channels_last": args.channels_last, "compile": not args.eager, "epochs": args.epochs}
    write(args.name, {"benchmark": "cifar_rate", **settings, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
