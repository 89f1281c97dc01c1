"""docs/stability.md from benchmarks/results/stability_start.json and results/: `python -m ...stability_page ROOT`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchformer.errors import UserError
from batchformer.report.charts import Chart
from batchformer.report.health import number, series
from batchformer.report.markdown import markdown
from batchformer.report.runs import Run, by_recipe, load_runs
from batchformer.report.scales import count_axis, linear_axis
from batchformer.report.stability_text import AFTER, BEFORE, DEPTH, STABLE_FORM, START
from batchformer.report.statistics import summarise
from batchformer.report.svg_file import lines_svg

STUDIES = ("vit-cifar100-32", "deit-ti-cifar100-100")
_SHOWN_DEPTHS = (1, 4, 8, 12)
Rows = Sequence[Mapping[str, Any]]


def write_stability_page(root: Path) -> Path:
    """The page and its two pictures, in `root/docs`."""
    source = root / "benchmarks" / "results" / "stability_start.json"
    try:
        rows = json.loads(source.read_text(encoding="utf-8"))["rows"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{source} cannot be read ({error!r}): run benchmarks/stability.py") from None
    docs = root / "docs"
    for name, what, label in (
        ("signal", "signal", "signal that survives dropout"),
        ("between", "between_samples", "share that differs between samples"),
    ):
        (docs / f"stability-{name}.svg").write_text(_by_depth(rows, what, label), encoding="utf-8")
    target = docs / "stability.md"
    runs = by_recipe(load_runs([root / "results"]))
    parts = [BEFORE, START.format(table=_start_table(rows)), _depths(source.with_name("stability_depth.json"))]
    target.write_text("\n".join(part for part in (*parts, _after(runs), STABLE_FORM) if part), encoding="utf-8")
    return target


def _by_depth(rows: Rows, what: str, label: str) -> str:
    forms = _forms(rows)
    depths = [float(row["depth"]) for row in rows]
    y = linear_axis([0.0, 1.0], label)
    chart = Chart(what, count_axis(depths, "behind the module after this block (from 1)"), y)
    lines = {form: [(float(row["depth"]), float(row[what])) for row in of_form] for form, of_form in forms.items()}
    ends = "; ".join(f"{form}: {points[-1][1]:.2f}" for form, points in lines.items())
    return lines_svg(chart, lines, f"{label.capitalize()}, by depth, before training", f"At the last depth {ends}")


def _start_table(rows: Rows) -> str:
    lines = []
    for form, of_form in _forms(rows).items():
        at = {row["depth"]: row for row in of_form}
        last = at[max(at)]
        weak = [row["gradient_related"] / row["gradient_plain"] for row in of_form[1:]]
        lines.append(
            [
                form,
                *(f"{at[depth]['signal']:.2f}" for depth in _SHOWN_DEPTHS),
                f"{last['between_samples']:.2f}",
                f"{last['norm_of_plain']:.2f}",
                f"{last['effective_rank']:.0f}",
                f"{last['attention_entropy']:.2f}",
                f"{min(weak):.2f} to {max(weak):.2f}",
            ]
        )
    header = ["form", *(f"signal after {depth}" for depth in _SHOWN_DEPTHS)]
    header += ["differs between samples", "norm / plain", "rank", "entropy", "gradient, related / plain"]
    return markdown(header, lines)


def _depths(source: Path) -> str:
    """The losses of both streams while training begins, by the number of modules; mean over the seeds."""
    if not source.is_file():
        return ""
    data = json.loads(source.read_text(encoding="utf-8"))
    groups: dict[tuple[int, str], dict[int, list[Mapping[str, Any]]]] = {}
    for row in data["rows"]:
        groups.setdefault((row["depth"], row["form"]), {}).setdefault(row["steps"], []).append(row)
    shown = sorted({row["steps"] for row in data["rows"]})[1::2]
    lines = []
    for (depth, form), by_steps in groups.items():
        cells = [
            " / ".join(_mean([row[stream] for row in by_steps[steps]]) for stream in ("plain_loss", "related_loss"))
            for steps in shown
        ]
        lines.append([f"{depth} blocks, {form}", str(len(by_steps[shown[0]])), *cells])
    header = ["a module after each of", "seeds", *(f"plain / related, steps to {steps}" for steps in shown)]
    return DEPTH.format(table=markdown(header, lines), chance=f"{math.log(data['classes']):.2f}")


def _after(runs: Mapping[str, Sequence[Run]]) -> str:
    """What training makes of it: one line per variant that has runs with two streams."""
    lines = []
    for recipe, of_recipe in runs.items():
        measured = [run for run in of_recipe if recipe.startswith(STUDIES) and run.raw.get("stream_health")]
        if not measured:
            continue
        healths = [run.raw["stream_health"] for run in measured]
        least = [min(v for v in series(h.get("points", []), "change_quiet") if v is not None) for h in healths]
        others = {
            share: [number(h, "gradient_on_others", "quiet", share) for h in healths]
            for share in ("norm_share", "squared_share")
        }
        signals = [series(h.get("points", []), "signal")[-1] for h in healths]
        lines.append(
            [
                f"`{recipe}`",
                str(len(measured)),
                _mean([_last(run, "plain_loss") for run in measured]),
                _mean([_last(run, "related_loss") for run in measured]),
                _mean(signals),
                _mean([100 * v for v in least], 1),
                " / ".join(_mean([None if v is None else 100 * v for v in shares], 1) for shares in others.values()),
                _mean([run.raw["metrics"]["all"] for run in measured]),
            ]
        )
    header = ["run", "seeds", "plain loss", "related loss", "signal behind the last module", "least change, %"]
    header += ["gradient on others, %: norms / squares", "top-1"]
    return AFTER.format(table=markdown(header, lines)) if lines else ""


def _forms(rows: Rows) -> dict[str, list[Mapping[str, Any]]]:
    forms: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        forms.setdefault(row["form"], []).append(row)
    return forms


def _last(run: Run, stream: str) -> float | None:
    losses = (run.raw.get("streams") or {}).get(stream) or [None]
    return losses[-1]


def _mean(values: Sequence[float | None], digits: int = 2) -> str:
    known = [float(v) for v in values if v is not None]
    return f"{summarise(known)[0]:.{digits}f}" if known else "–"


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m batchformer.report.stability_page ROOT_OF_THE_REPOSITORY", file=sys.stderr)
        return 2
    try:
        write_stability_page(Path(arguments[0]))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
