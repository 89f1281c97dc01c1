"""Rate of `batchformer data --check` against Pillow's own decoding of the same files.

    python -m benchmarks.check_rate IMAGES [--rounds 7] [--threads N] [--limit 2000] [--out benchmarks/results]

`IMAGES` are folders of image files. Pillow's rate is that of `Image.open(file).load()` and nothing else; the check
reads and decodes each file once, and takes size, mode, orientation and checksums of some pixels from it (files that
agree in these are read again, which is not timed). Both run in as many threads, in turn, with the files in the page
cache, and the shortest round of each counts, by the clock and by processor time: that is the one to compare on a
machine that others use too.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image, __version__, features

from batchformer.data.check import read_facts
from batchformer.data.images import images_in
from benchmarks._common import write


def decode(paths: list[str], threads: int) -> None:
    def load(path: str) -> None:
        with Image.open(path) as image:
            image.load()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(load, paths, chunksize=64))


def measure(paths: list[str], threads: int, rounds: int) -> dict[str, float]:
    """Images a second of both, by the clock and by processor time, and the ratios of the check's rate to Pillow's."""
    ways: dict[str, Callable[[], object]] = {
        "pillow": lambda: decode(paths, threads),
        "check": lambda: read_facts(paths, threads=threads),
    }
    clocks = {"images_per_s": time.perf_counter, "images_per_processor_s": time.process_time}
    best = {(name, clock): float("inf") for name in ways for clock in clocks}
    for _ in range(rounds):
        for name, way in ways.items():
            began = {clock: now() for clock, now in clocks.items()}
            way()
            for clock, now in clocks.items():
                best[name, clock] = min(best[name, clock], now() - began[clock])
    rates = {f"{name}_{clock}": round(len(paths) / seconds, 1) for (name, clock), seconds in best.items()}
    ratios = {clock: best["pillow", clock] / best["check", clock] for clock in clocks}
    return {**rates, **{f"ratio_of_{clock}": round(ratio, 3) for clock, ratio in ratios.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    rows = []
    for folder in given.images:
        paths = images_in(folder)[: given.limit]
        sizes = [len(Path(path).read_bytes()) for path in paths]  # and into the page cache
        with Image.open(paths[0]) as first:
            kind = f"{first.format}, the first {first.width} x {first.height}"
        row = {"images": len(paths), "kind": kind, "mean_kilobytes": round(sum(sizes) / len(sizes) / 1000, 1)}
        rows.append({**row, "threads": given.threads, **measure(paths, given.threads, given.rounds)})
    turbo = features.check_feature("libjpeg_turbo")
    pillow = {"pillow": __version__, "libjpeg_turbo": turbo}
    write("check_rate", {**pillow, "rounds": given.rounds, "sets": rows}, given.out)


if __name__ == "__main__":
    main()
