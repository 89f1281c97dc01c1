"""docs/stability.md from benchmarks/results/ and results/."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchformer.errors import UserError
from batchformer.report.charts import Chart, count_axis, linear_axis
from batchformer.report.health import number, series
from batchformer.report.runs import Run, by_recipe, load_runs
from batchformer.report.statistics import summarise
from benchmarks._chart_files import lines_svg
from benchmarks._markdown import markdown

_STUDIES = ("vit-cifar100-32", "deit-ti-cifar100-100")
_SHOWN_DEPTHS = (1, 4, 8, 12)
Rows = Sequence[Mapping[str, Any]]

_BEFORE = """\
# Stability: why the related stream can fail to learn, and a stable form

Written by `python -m benchmarks.pages stability` from `benchmarks/results/stability_start.json` (made by
`benchmarks/stability.py`) and the files in `results/`.

BatchFormerV2 inserts a module after one block of a network or after all of them. With many modules the paper mentions
frequent crashes without giving a reason; its code skips steps whose loss is not finite. There is another failure that
is easily missed: the loss of the related rows stays at chance for a long time, or permanently, while the plain rows
learn. Then nothing is learnt through the modules, and the run is a baseline at twice the cost. The sum of both losses
does not show it. `bf.StreamGuard` detects this and warns once; every classification run uses it (and logs
`train/loss_related`), and so does `BatchFormerCallback` for your own Lightning modules.
"""

_START = """\
## What a module does to a token

A related token after a module is the input token plus what attention and the MLP add. The shared blocks and the
classifier can learn only from the part that distinguishes samples *and* is the same under another dropout mask.
**Signal** is the cosine between the related tokens (minus their mean over the batch) of two forwards that differ in
the dropout masks only. Measured at the initial weights, DeiT-Ti with patches of 4 on one batch of CIFAR-100, a module
after each of the twelve blocks. What differs, norm, rank (the effective one of the related tokens) and entropy (of the
attention; 1: to all samples equally) are those at the last module; the gradient is what the loss of the related
rows sends into the parameters of a block over what that of the plain rows sends, the blocks behind the first module:

{table}

![Signal by depth](stability-signal.svg)

Two things happen in the published form (post-LN, dropout 0.5), and both compound with depth:

1. **Dropout noise replaces the token.** Dropout with p = 0.5 on a branch adds noise as large as the branch. LayerNorm
   after the sum rescales token + noise to a fixed size, so each module *replaces* a fixed share of the token.
   The signal falls geometrically with the number of modules: what is left after twelve is the product of twelve
   shares. Norm, effective rank and the share that differs between samples all look healthy, because noise differs
   between samples as well. And with or without noise the rescaling weakens the gradient that the related rows send
   into the shared blocks behind the first module, to a fraction of what the plain rows send.
2. **Without the noise, the batch mean replaces it.** Attention is nearly uniform at the start, so what it adds is
   nearly the same for all samples of the batch, and LayerNorm again reduces the share of the token. Less dropout alone
   therefore does not help for long: the share that differs between samples falls instead (next picture).

![What differs between samples, by depth](stability-between.svg)

Pre-LN does not rescale the sum, but the branches have the size of a *normalised* token whatever the size of the token
they are added to. Early tokens, and the class token most of all, are small, so the noise still wins, and the norm of
the related tokens runs away from that of the plain ones, which the shared blocks also see. A small layer scale
repairs the large tokens and leaves little relation.
"""

_DEPTH = """\
## How training begins

The same, seen from the losses: a tiny ViT on the embedded digits (`benchmarks/stability_depth.py`, on a CPU), mean
losses of the plain and of the related rows over windows of 50 steps, the learning rate warmed up over 100.
Chance is {chance}.

{table}

The deeper the stack of published modules, the longer its related rows stay at chance, because the first steps must
rebuild the signal before anything can be learnt from it. With 48 modules they do not leave it in these steps: the
plain rows learn, and nothing is learnt through the modules. This reproduces the collapse on freely available data.
Less dropout does not prevent it at that depth, in line with the second reason above. The stable form trains both
streams side by side at every depth, with the same data and seeds.
"""

_AFTER = """\
## After training

At the end of training, on a batch of training images: the losses of the last epoch, the signal behind the last
module, the least that any module changes the related tokens, in percent of their norm, and the share of the gradient
of a sample's loss that falls on other samples (both without dropout), once by norms and once by squared norms: it is
spread thin over many of them, which counts in the first sum and hardly in the second.

{table}

A run can recover from such a start: if the first steps manage to strengthen the signal, related and plain loss end
side by side, as in these runs of the published form. The 48 modules above did not, and neither did those of the
earlier, shorter measurement this project began with: there the published form, after the same twelve blocks, ended
with its related rows at chance. Which of the two happens depends on depth, learning rate, data and length; the form
below does not leave it to them.

Stable does not mean better. Once the published form has passed its slow start, its strong perturbation of the related
rows gives more accuracy here than the gentler stable form. Use the published form unless `bf.StreamGuard` warns; use
the stable one if it does, or if depth, half precision or a short schedule leave no room for a slow start.

The related loss may end *below* the plain one. In DeiT's mixing all images of a batch share one mixing ratio and one
box, and a row that sees the batch can tell them better than a row that sees one image.
"""

_STABLE_FORM = """\
## The stable form

```python
import timm
import batchformer as bf

vit = timm.create_model("vit_tiny_patch16_224", num_classes=10)
attachment = bf.attach(vit, blocks="all", heads=3, variant="stable")
bf.detach(vit)
```

`variant="stable"` is `norm="relative"`: each branch is measured by the token it is added to, and the sum keeps the
token's size (`src/batchformer/nn/encoder.py`):

$$\\hat{x} = \\mathrm{keep}\\big(x + s\\,|x|\\,\\mathrm{LN}(\\mathrm{MSA}(x / |x|))\\big), \\qquad
x' = \\mathrm{keep}\\big(\\hat{x} + s\\,|x|\\,\\mathrm{LN}(\\mathrm{MLP}(\\hat{x} / |x|))\\big)$$

$|x|$ is the root mean square of the token, $\\mathrm{keep}$ scales the sum back to $|x|$, and $s$ is learnt from 0.1
on (`layer_scale=`). What follows from it, whatever the depth, the precision or the token:

- a module cannot overwhelm a token: the noise of each of its two branches is at most $s$ of the token's size, so after
  $m$ modules of $s = 0.1$ the signal is still about $(1 + s^2)^{-2m}$ or more (the table above), where the published
  form loses a far larger share with every module;
- it cannot inflate it either: related tokens keep the norm of the plain ones, the shared blocks see one scale, and
  nothing overflows in half precision;
- it still relates: a branch that is switched on changes the token by $s$ of its size, not by what weight decay left
  of it;
- dropout stays at 0.5, the regulariser of the papers.

The parameters are those of the papers' layer and the two vectors $s$. The published form stays the default, and the
recipes that reproduce published rows use it. `bf.StreamGuard` tells you when a run needs the stable one.
"""


def pages(root: Path) -> dict[Path, str]:
    """The page and its two pictures."""
    source = root / "benchmarks" / "results" / "stability_start.json"
    try:
        rows = json.loads(source.read_text(encoding="utf-8"))["rows"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{source} cannot be read ({error!r}): run benchmarks/stability.py") from None
    docs = root / "docs"
    signal = _by_depth(rows, "signal", "signal that survives dropout")
    between = _by_depth(rows, "between_samples", "share that differs between samples")
    runs = by_recipe(load_runs([root / "results"]))
    parts = [_BEFORE, _START.format(table=_start_table(rows)), _depths(source.with_name("stability_depth.json"))]
    page = "\n".join(part for part in (*parts, _after(runs), _STABLE_FORM) if part)
    return {docs / "stability.md": page, docs / "stability-signal.svg": signal, docs / "stability-between.svg": between}


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
    return _DEPTH.format(table=markdown(header, lines), chance=f"{math.log(data['classes']):.2f}")


def _after(runs: Mapping[str, Sequence[Run]]) -> str:
    """What training makes of it: one line per variant that has runs with two streams."""
    lines = []
    for recipe, of_recipe in runs.items():
        measured = [run for run in of_recipe if recipe.startswith(_STUDIES) and run.raw.get("stream_health")]
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
                _mean([run.metrics["top1"] for run in measured]),
            ]
        )
    header = ["run", "seeds", "plain loss", "related loss", "signal behind the last module", "least change, %"]
    header += ["gradient on others, %: norms / squares", "top-1"]
    return _AFTER.format(table=markdown(header, lines)) if lines else ""


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
