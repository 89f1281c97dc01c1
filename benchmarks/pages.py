"""Write what docs/ and README.md show of result files, recipes and the behaviour suite; everything else in them stays.

python -m benchmarks.pages [results report when-it-helps stability recipes families kernels models]
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from batchformer.errors import UserError
from benchmarks._markdown import between_markers, markdown

ROOT = Path(__file__).parents[1]
# name -> the module that makes these files; README.md is of two of them
PAGES = {
    "results": "results_page",
    "report": "report_page",
    "when-it-helps": "when_it_helps",
    "stability": "stability_page",
    "recipes": "recipes_page",
    "families": "family_sections",  # docs/domains.md, docs/zero-shot.md and docs/long-tail.md
    "kernels": "pages",
    "models": "models_table",  # README.md and docs/attach.md
}


def pages(root: Path) -> dict[Path, str]:
    """docs/kernels.md: forward and backward of every shape, with the memory of our layer stored in full and in part."""
    rows = json.loads((root / "benchmarks" / "results" / "layer.json").read_text())["rows"]
    header = ["input", "heads", "ours", "papers'", "papers' / ours", "ours in a CUDA graph", "memory, ours", "papers'"]
    lines = []
    for row in rows:
        if row["pass"] == "fwd+bwd":
            name = str(tuple(row["shape"])) + ("" if row["memory"] == "fast" else f", `{row['memory']}`")
            times = [f"{row[key]:.2f} ms" for key in ("ours_ms", "papers_ms")]
            memory = [f"{row[key]:.2f} GiB" for key in ("ours_gib", "papers_gib")]
            lines.append(
                [name, str(row["heads"]), *times, f"{row['speedup']:.2f}", f"{row['graph_ms']:.2f} ms", *memory]
            )
    page = root / "docs" / "kernels.md"
    text, table = page.read_text(encoding="utf-8"), markdown(header, lines)
    return {page: between_markers(text, table, page.name, "<!-- layer -->", "<!-- /layer -->")}


def write(name: str, root: Path = ROOT) -> int:
    """The files of this name, or one line that says what is wrong; the exit code."""
    try:
        files = importlib.import_module(f"benchmarks.{PAGES[name]}").pages(root)
    except (UserError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    names = parser.parse_args().names or list(PAGES)
    if unknown := [name for name in names if name not in PAGES]:
        parser.error(f"{unknown[0]}: choose from {', '.join(PAGES)}")
    return max([write(name) for name in names])


if __name__ == "__main__":
    raise SystemExit(main())
