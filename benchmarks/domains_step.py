"""A step of `pacs-128` (ResNet-50 at 128 px, 3 x 32 images) in the loop of `batchformer fit` against its bare step.

    python -m benchmarks.domains_step --data-root DIR [--only erm coral+batchformer] [--seconds 5] [--out DIR]

Loader, augmentation on the device, SWAD's sums and logging are in `ms`; `bare_ms` is the replay of the CUDA graph alone
and `of_bare` their ratio: see `loop_rate.py` and `_busy.py`. The weights are random, which changes no time.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks._common import write
from benchmarks.domains_study import STUDIES
from benchmarks.loop_rate import measure

RECIPE = "pacs-128"
SHOWN = ["erm", "erm+batchformer", "coral+batchformer", "irm+batchformer", "vrex+batchformer", "mixstyle+batchformer"]


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
        write("domains_step", {"benchmark": "domains_step", "rows": rows}, args.out, show=False)
    return 1 if len(rows) < len(found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
