"""Result files with made-up numbers, in the shape a run writes them."""

import json
import math
import random


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
        run = folder / f"{each['recipe']}-{each['method']}-seed{each['seed']}"
        run.mkdir(parents=True)
        (run / "result.json").write_text(json.dumps(each))
    return folder


def comparison(seeds=3, **keywords):
    return [result(method=m, seed=s, **keywords) for m in ("baseline", "batchformer") for s in range(seeds)]
