"""A step of `pacs-128` (ResNet-50 at 128 px, 3 x 32 images) in the loop of `batchformer fit` against its bare step.

    python -m benchmarks.domains_step --data-root DIR [--only erm coral+batchformer] [--seconds 5] [--out DIR]

Loader, augmentation on the device, SWAD's sums and logging are in `ms`; `bare_ms` is the replay of the CUDA graph alone
and `of_bare` their ratio: see `loop_rate.py` and `_busy.py`. The weights are random, which changes no time.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks._common import write
from benchmarks.domains_study import STUDIES
from benchmarks.loop_rate import measure

SHOWN = ["erm", "erm+batchformer", "coral+batchformer", "irm+batchformer", "vrex+batchformer", "mixstyle+batchformer"]


def main(name: str, about: str | None, recipe: str, variants: Mapping[str, str], shown: Sequence[str]) -> int:
    """Measure variants of a recipe, by default those `shown`, and write benchmarks/results/NAME.json."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--only", nargs="+", choices=list(variants), default=list(shown))
    parser.add_argument("--seconds", type=float, default=5.0, help="of whole epochs, at least")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("extra", nargs="*", help="after --: more overrides for every run")
    args = parser.parse_args()
    found = {each: measure(each, [recipe, "--variant", variants[each]], args) for each in args.only}
    rows = [row for row in found.values() if row is not None]
    if rows:
        write(name, {"benchmark": name, "rows": rows}, args.out, show=False)
    return 1 if len(rows) < len(found) else 0


if __name__ == "__main__":
    raise SystemExit(main("domains_step", __doc__, "pacs-128", STUDIES["pacs-128"].variants, SHOWN))
