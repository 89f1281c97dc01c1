"""``batchformer report RUNS...``: write one HTML page about runs or comparisons."""

from pathlib import Path

from batchformer.cli.arguments import Option, read_arguments
from batchformer.errors import UserError
from batchformer.files import refuse_to_replace

HELP = """
batchformer report RUNS... [--out report.html] [--title TEXT]

Write one self-contained HTML page about run folders, comparison folders or result files: a table of the variants,
learning curves, accuracy per class, gradient influence. It needs no network.
"""


def run(args: list[str]) -> int:
    given = read_arguments(args, [Option("out"), Option("title")])
    if not given.positional:
        raise UserError("report needs run folders, comparison folders or result files: batchformer report runs/*")

    from batchformer.report import write_report
    from batchformer.report.page import MADE_BY

    paths = [Path(path) for path in given.positional]
    for path in paths:
        if not path.exists():
            raise UserError(f"There is no run folder or result file {path}.")
    out = Path(given.value("out") or "report.html")
    refuse_to_replace(out / "report.html" if out.is_dir() else out, lambda content: MADE_BY.encode() in content)
    page = write_report(paths, out, title=given.value("title"))
    print(f"{page}: open it in a browser (no network needed).")
    return 0
