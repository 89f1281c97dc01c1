"""Every test that needs a GPU, in parallel, with one file that says what came out.

    python -m benchmarks.gpu_tests [--workers 8] [--out benchmarks/results/gpu_tests.json]

Workers need pytest-xdist; without it the tests run one after another. Only files with such tests are imported, so that
what other tests need may be missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from batchformer.files import write_json
from batchformer.runs.result import versions

REPOSITORY = Path(__file__).parents[1]
OUT = REPOSITORY / "benchmarks/results/gpu_tests.json"
SLOWEST = 10


class Record:
    """Outcomes by the name of the test, as a plugin of pytest."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.skipped: dict[str, str] = {}

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = "failed"

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid
        self.seconds[name] = self.seconds.get(name, 0.0) + report.duration
        if report.failed or (report.skipped and self.outcomes.get(name) != "failed"):
            self.outcomes[name] = report.outcome
        elif report.when == "call":
            self.outcomes.setdefault(name, report.outcome)
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[name] = str(report.longrepr[2]).removeprefix("Skipped: ")

    def summary(self) -> dict[str, Any]:
        found = list(self.outcomes.values())
        slowest = sorted(self.seconds.items(), key=lambda entry: -entry[1])[:SLOWEST]
        return {
            **{outcome: found.count(outcome) for outcome in ("passed", "failed", "skipped")},
            "failures": sorted(name for name, outcome in self.outcomes.items() if outcome == "failed"),
            "skips": dict(sorted(self.skipped.items())),
            "slowest": {name: round(seconds, 1) for name, seconds in slowest},
        }


def files_with_gpu_tests(folder: Path) -> list[str]:
    files = sorted(folder.rglob("test_*.py"))
    return [str(file.relative_to(REPOSITORY)) for file in files if re.search(r"mark\.gpu\b", file.read_text())]


def hardware() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"device": None}
    return {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--only", default="", help="an expression for pytest -k")
    given = parser.parse_args(arguments)
    device = hardware()
    if device["device"] is None:
        sys.exit("no CUDA device here: every one of these tests would be skipped.")
    os.chdir(REPOSITORY)
    parallel = given.workers > 1 and importlib.util.find_spec("xdist") is not None
    words = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    words += ["-n", str(given.workers), "--dist", "worksteal"] if parallel else []
    words += ["-k", given.only] if given.only else []
    record, begin = Record(), time.perf_counter()
    code = pytest.main([*words, *files_with_gpu_tests(REPOSITORY / "tests")], plugins=[record])
    result = {
        **record.summary(),
        "seconds": round(time.perf_counter() - begin, 1),
        "workers": given.workers if parallel else 1,
        **device,
        "versions": {**versions(), **_version_of_triton()},
    }
    write_json(given.out, result)
    print(f"{given.out}: {result['passed']} passed, {result['failed']} failed, {result['skipped']} skipped")
    return int(code)


def _version_of_triton() -> dict[str, str]:
    from importlib import metadata

    try:
        return {"triton": metadata.version("triton")}
    except metadata.PackageNotFoundError:
        return {}


if __name__ == "__main__":
    sys.exit(main())
