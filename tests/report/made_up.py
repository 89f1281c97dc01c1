"""Result files with made-up numbers: in the shape of version 0.1, and `pose` in that of this one."""

import json
import math
import random

from batchformer.metrics.measures import CLASS_SCORES, measures_of, with_current_names


def result(recipe="cifar100-lt-100", method="batchformer", seed=0, classes=100, epochs=60, gain=0.8, **more):
    """A complete result; the numbers only need to look like a run's."""
    noise = random.Random(f"{recipe}{method}{seed}")
    shift = gain if method == "batchformer" else 0.0
    counts = [int(500 * 100 ** (-k / max(1, classes - 1))) for k in range(classes)]
    shared = random.Random(f"{recipe}{seed}").gauss(0, 0.6)
    per_class = [
        min(
            100.0,
            max(0.0, 74 - 42 * k / classes + 9 * random.Random(k).gauss(0, 1) + shared + shift + noise.gauss(0, 2)),
        )
        for k in range(classes)
    ]

    def mean(low, high):
        chosen = [v for v, n in zip(per_class, counts, strict=True) if low <= n < high]
        return sum(chosen) / len(chosen) if chosen else math.nan

    final = mean(0, 10**9)
    history = [
        {
            "epoch": e,
            "train_loss": 4.6 * math.exp(-3 * e / epochs) + 0.4 + noise.random() * 0.05,
            "all": final * (1 - math.exp(-5 * (e + 1) / epochs)) / (1 - math.exp(-5))
            + (e < epochs - 1) * noise.gauss(0, 0.7),
        }
        for e in range(epochs)
    ]
    made = {
        "recipe": recipe,
        "method": method,
        "seed": seed,
        "protocol": "last",
        "metrics": {"all": final, "many": mean(101, 10**9), "medium": mean(20, 101), "few": mean(0, 20)},
        "per_class": per_class,
        "class_counts": counts,
        "class_names": [f"class {k}" for k in range(classes)],
        "history": history,
        "epochs": epochs,
        "steps": epochs * 21,
        "images_per_s": 71000.0 + noise.random() * 900,
        "data": {"fingerprint": "0f3a" * 16, "train_images": sum(counts), "test_images": 10000},
        "versions": {"batchformer": "0.1.0", "python": "3.11.9", "torch": "2.13.0", "lightning": "2.6.6"},
        "device": "NVIDIA H200",
        "wall_s": 70.0 + noise.random(),
        "config": {
            "model": {"backbone": "resnet32", "method": method, "seed": seed, "loss": {"name": "balanced_softmax"}},
            "data": {"class_path": "batchformer.data.CIFAR100LT", "init_args": {"batch_size": 512, "imbalance": 100.0}},
            "trainer": {"max_epochs": epochs, "precision": "bf16-mixed"},
        },
    }
    if method == "batchformer":
        made["gradient_influence"] = {
            "wrt": "features",
            "per_class": [0.02 + 0.0002 * k + 0.004 * noise.random() for k in range(classes)],
        }
    return {**made, **more}


def write(folder, results):
    """Run folders below `folder`, as `compare` lays them out."""
    for each in results:
        names = [each["recipe"], each.get("variant") or each["method"], each.get("target")]
        run = folder / "-".join([*filter(None, names), f"seed{each['seed']}"])
        run.mkdir(parents=True)
        (run / "result.json").write_text(json.dumps(each))
    return folder


def comparison(seeds=3, **keywords):
    return [result(method=m, seed=s, **keywords) for m in ("baseline", "batchformer") for s in range(seeds)]


def health(depth=12, dead=False, batch=64):
    """What `StreamHealth.save` writes, for a ViT with an insertion after every block."""

    def stats(norm, rank):
        return {"norm": norm, "effective_rank": rank, "between_samples": 0.8}

    def signal(k):
        return 0.8 ** (k + 1) if dead else 1 - 0.01 * k

    points = [
        {
            "path": f"blocks.{k}",
            "plain": stats(10 + k, 40 - k),
            "related_in": stats(12.0, 40),
            "related_out": stats(12.0, 41),
            "change": 0.6,
            "change_quiet": 0.25 - 0.01 * k,
            "from_others": 0.1 - 0.005 * k,
            "direction_kept": 0.95,
            "reproducible": signal(k),
            "reproducible_plain": 1.0,
            "signal": signal(k),
            "signal_plain": 1.0,
            "attention": [{"entropy": [0.9, 0.95 - 0.03 * k, 0.7], "on_itself": [0.1, 0.1, 0.2]}],
            "gradient": 0.3,
        }
        for k in range(depth)
    ]
    blocks = [
        {
            "path": f"blocks.{k}",
            "plain": stats(10 + k, 40 - k),
            "related": stats(13.8, 45),
            "signal": signal(k),
            "gradient": {"plain": 0.5 + 0.1 * k, "related": (0.01 if dead else 0.4) + 0.02 * k, "cosine": 0.3},
        }
        for k in range(depth)
    ]
    return {
        "batch": batch,
        "positions": 16,
        "streams": "duplicate",
        "plain_loss": 3.1,
        "related_loss": 4.6 if dead else 3.2,
        "chance": math.log(100),
        "points": points,
        "blocks": blocks,
        "gradient_on_others": {
            mode: {"norm_share": 0.31, "squared_share": 0.04, "samples": 8} for mode in ("train", "quiet")
        },
    }


def classification(recipe="vit-cifar100-32", method="batchformer", seed=0, top1=55.0, dead=False, epochs=50, **more):
    """A result of image classification on balanced classes, with the losses of its streams."""
    noise = random.Random(f"{recipe}{method}{seed}")
    top1 += random.Random(seed).gauss(0, 0.4) + noise.gauss(0, 0.1)
    falling = [4.6 * math.exp(-1.2 * e / epochs) + 0.02 * noise.random() for e in range(epochs)]
    made = result(recipe, method, seed, epochs=epochs)
    del made["per_class"]
    made.pop("gradient_influence", None)
    made |= {
        "metrics": {"top1": top1, "top5": top1 + 27, "all": top1},
        "class_counts": [500] * 100,
        "history": [
            {"epoch": e, "train_loss": falling[e], "all": top1 * (e + 1) / epochs} for e in range(9, epochs, 10)
        ],
    }
    if method == "batchformer":
        related = [4.605 - 0.01 * noise.random() for _ in falling] if dead else [loss + 0.1 for loss in falling]
        made["streams"] = {"plain_loss": falling, "related_loss": related}
    return {**made, **more}


def pose(seeds=3, epochs=20, variants=("scratch", "mixstyle", "mixstyle+batchformer"), recipe="hands-pose", **more):
    """Three variants, four targets, an error in millimetres and a section that only this family has."""
    measures = [
        {"key": "mpjpe", "label": "MPJPE", "unit": "mm", "better": "lower", "primary": True,
         "name": "mean joint error", "note": "", "bounds": [0.0, None]},
        {"key": "auc", "label": "AUC", "unit": "", "better": "higher", "primary": False,
         "name": "area under the curve", "note": "", "bounds": [0.0, 1.0]},
    ]  # fmt: skip
    levels = {"indoor": 18.0, "sun": 24.0, "night": 31.0, "glove": 27.0}
    gains = dict(zip(variants, (0.0, 0.4, 2.5), strict=False))
    made = []
    for variant, gain in gains.items():
        for target, level in levels.items():
            for seed in range(seeds):
                shared = random.Random(f"{target}{seed}").gauss(0, 0.8)
                noise = random.Random(f"{variant}{target}{seed}")
                error = level - gain + shared + noise.gauss(0, 0.3)
                falling = [error + 40 * math.exp(-6 * (e + 1) / epochs) * (e < epochs - 1) for e in range(epochs)]
                thresholds = list(range(0, 55, 5))
                caught = [100 * (1 - math.exp(-t / error)) for t in thresholds]
                section = {
                    "title": "Joints within a threshold",
                    "text": f"Left out: {target}. See `pck`.",
                    "table": {"header": ["joint", "error, mm"], "rows": [["wrist", f"{error - 4:.1f}"], ["tip", 40]]},
                    "series": {"x": thresholds, "lines": {"all joints": caught, "tips": [0.8 * c for c in caught]},
                               "xlabel": "threshold, mm", "ylabel": "joints, %"},
                }  # fmt: skip
                made.append({
                    "recipe": recipe, "variant": variant, "target": target, "reference": variants[0], "seed": seed,
                    "protocol": "last", "measures": measures, "metrics": {"mpjpe": error, "auc": 1 - error / 50},
                    "history": [{"epoch": e, "train_loss": v / 10, "mpjpe": v} for e, v in enumerate(falling)],
                    "sections": [section] if seed == 0 else [], "epochs": epochs, "steps": 9 * epochs,
                    "data": {"fingerprint": target}, "device": "CPU", "versions": {}, "wall_s": 3.0,
                    "command": f"batchformer compare {recipe} --seeds {seeds}", **more,
                })  # fmt: skip
    return made


def with_failures(made, classes, matrix=True):
    """The result with the entry that an analysis leaves; class k has an F1 of 90 - k, the last two none."""
    made = with_current_names(made)
    f1 = [90.0 - k for k in range(classes - 2)] + [None, None]
    images = [20] * (classes - 1) + [0]
    entry = {
        "evaluated": {"set": "val", "images": 20 * (classes - 1)},
        "columns": {"images": images, "precision": f1, "recall": f1, "F1": f1},
        "worst_by": "F1",
        "confusions": [[classes - 3, 0, 7], [1, 2, 3]],
        "calibration": {
            "ece": 12.34,
            "bins": [[40.0, 30.0, 10], [90.0, 70.0, 50]],
            "temperature": 1.7,
            "fitted_on": "halves",
            "ece_scaled": 3.21,
            "bins_scaled": [[35.0, 30.0, 60]],
        },
    }
    if matrix:
        entry["matrix"] = [[20 * (i == j) for j in range(classes)] for i in range(classes)]
    values = dict(zip((m.key for m in CLASS_SCORES), (80.5, 79.5, 12.34, 3.21), strict=True))
    measures = [*measures_of(made), *CLASS_SCORES]
    return {**made, "failures": entry, "metrics": {**made["metrics"], **values},
            "measures": [m.as_dict() for m in measures]}  # fmt: skip
