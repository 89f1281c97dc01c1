"""A step of `plantvillage-czsl-trained` (ResNet-50 at 128 px, 128 images) in the loop of `batchformer fit` and bare.

    python -m benchmarks.zero_shot_step --data-root DIR [--only cge cge+batchformer] [--seconds 5] [--out DIR]

`ms` is with loader, augmentation on the device and logging, `bare_ms` the replay of the CUDA graph, `of_bare` their
ratio: see `loop_rate.py` and `_busy.py`. The weights are random, which changes no time.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks._common import write
from benchmarks.loop_rate import measure
from benchmarks.zero_shot_study import STUDIES

RECIPE = "plantvillage-czsl-trained"
SHOWN = ["visual-product", "compcos+batchformer", "cge", "cge+batchformer"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--only", nargs="+", choices=list(STUDIES[RECIPE].variants), default=SHOWN)
    parser.add_argument("--seconds", type=float, default=5.0, help="of whole epochs, at least")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("extra", nargs="*", help="after --: more overrides for every run")
    args = parser.parse_args()
    found = {name: measure(name, [RECIPE, "--variant", STUDIES[RECIPE].variants[name]], args) for name in args.only}
    rows = [row for row in found.values() if row is not None]
    if rows:
        write("zero_shot_step", {"benchmark": "zero_shot_step", "rows": rows}, args.out, show=False)
    return 1 if len(rows) < len(found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
