"""The part of the page about the two streams of one recipe; empty for runs that carry nothing about them."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from batchformer.errors import UserError
from batchformer.report.health import number, reading
from batchformer.report.html_parts import figure
from batchformer.report.measures import measure_of
from batchformer.report.runs import Run
from batchformer.report.stream_figures import (
    STREAMS,
    change_chart,
    entropy_chart,
    gradient_chart,
    loss_chart,
    signal_chart,
    stats_chart,
)

FOLDER, INDEX = "pictures", "pictures.json"
_KINDS = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg"}
_MOST_BYTES = 4 * 2**20


def streams_section(name: str, runs: Sequence[Run]) -> str:
    """Losses of both streams, their health per depth, pictures of the attention: whatever the runs have."""
    related = [run for run in runs if run.method == "batchformer"]
    measured = next((run for run in related if run.health), None)
    health = measured.health if measured is not None else {}
    figures = _losses(name, related, health)
    if measured is not None:
        figures += _summary(measured) + _depth_figures(name, health)
    seen = _pictures(related)
    if not figures and not seen:
        return ""
    grid = f'<div class="grid">{figures}</div>' if figures else ""
    return f"<h3>The two streams</h3>{grid}{seen}"


def _losses(name: str, runs: Sequence[Run], health: Mapping[str, Any]) -> str:
    classes = {len(run.class_counts) for run in runs} - {0}
    chance = math.log(next(iter(classes))) if len(classes) == 1 else number(health, "chance")
    objects = measure_of(run.metrics for run in runs).objects
    if objects:  # whose loss is of boxes and masks as well
        chance = None
    picture = loss_chart(f"{name}-stream-losses", runs, chance)
    if picture is None:
        return ""
    caption = (
        f"Mean of the seeds; band: smallest to largest. A related stream that stays {'up' if objects else 'at chance'} "
        "while the plain one learns is dead: nothing is learnt through the module."
    )
    return figure("Training loss of both streams", picture, caption, STREAMS)


def _summary(run: Run) -> str:
    health, told = run.health, reading(run.health)
    tone = {True: "helped", False: "hurt", None: "incomplete"}[told.alive]
    rows = [
        ("Loss, plain rows", _show(number(health, "plain_loss"), ".2f")),
        ("Loss, related rows", _show(number(health, "related_loss"), ".2f")),
        ("Loss by chance", _show(number(health, "chance"), ".2f")),
    ]
    for mode, words in (("quiet", "dropout off"), ("train", "as in training")):
        shares = [number(health, "gradient_on_others", mode, key) for key in ("norm_share", "squared_share")]
        rows.append((f"Gradient on other samples, {words}", " / ".join(_show(share, ".1%") for share in shares)))
    body = "".join(f'<tr><th scope="row">{escape(what)}</th><td>{escape(value)}</td></tr>' for what, value in rows)
    caption = (
        f"Measured on one batch of {_show(number(health, 'batch'), '.0f')} images, seed {run.seed}. Gradient: share of "
        "the sum of norms / of the squared norms."
    )
    return (
        f'<div class="card health {tone}"><p><strong>{escape(told.sentence)}</strong></p><table>'
        f"<caption>{escape(caption)}</caption><tbody>{body}</tbody></table></div>"
    )


def _depth_figures(name: str, health: Mapping[str, Any]) -> str:
    both = dict(STREAMS)
    drawn: list[tuple[str, str | None, str, dict[str, str]]] = [
        (
            "What survives of the related tokens",
            signal_chart(f"{name}-signal", health),
            "Cosine, between two dropout masks, of what tells samples apart (tokens minus their mean over the batch). "
            "At 0 there is only noise.",
            {},
        ),
        (
            "What each module changes",
            change_chart(f"{name}-change", health),
            "Without dropout, in percent of the tokens' norm; dotted: 5 %. From others: what remains of it when each "
            "sample looks at itself alone is taken away.",
            {"related": "whole change", "others": "from other samples"},
        ),
        (
            "Gradient into the blocks",
            gradient_chart(f"{name}-gradient", health),
            "Norm of the gradient of each stream's mean loss at the parameters of the block.",
            both,
        ),
        (
            "How widely the modules look",
            entropy_chart(f"{name}-entropy", health),
            "Entropy of the attention over the batch, relative to its largest value: 1 is uniform, 0 is one sample. "
            "Small dots: single heads.",
            {},
        ),
        (
            "Norm of the tokens",
            stats_chart(f"{name}-norm", health, "norm", "mean norm of a token"),
            "Behind each block, insertion included.",
            both,
        ),
        (
            "Effective rank of the tokens",
            stats_chart(f"{name}-rank", health, "effective_rank", "effective rank"),
            "Directions the samples of the batch take up at a position. Noise has a high rank, too: read it with the "
            "share that survives.",
            both,
        ),
    ]
    return "".join(figure(title, svg, caption, legend) for title, svg, caption, legend in drawn if svg is not None)


def _pictures(runs: Sequence[Run]) -> str:
    """What `analysis.pictures.write_pictures` left in the folder of the first run that has it, inside the page."""
    for run in runs:
        index = run.source.parent / FOLDER / INDEX
        if run.source.name == "result.json" and index.is_file():
            drawn = "".join(picture_of(index.parent, entry) for entry in pictures_in(index))
            return f'<div class="grid">{drawn}</div>' if drawn else ""
    return ""


def pictures_in(file: Path) -> list[dict[str, str]]:
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is damaged ({error}): delete it or draw the pictures again") from None
    if not isinstance(entries, list) or not all(
        isinstance(e, dict) and isinstance(e.get("file"), str) for e in entries
    ):
        raise UserError(f"{file} is not an index of pictures: it must list objects with 'file', 'title' and 'caption'")
    return entries


def picture_of(folder: Path, entry: Mapping[str, str], whole_width: bool = False) -> str:
    file = folder / entry["file"]
    if file.resolve().parent != folder.resolve() or not file.is_file() or file.stat().st_size > _MOST_BYTES:
        return ""
    content = file.read_bytes()
    kind = next((kind for start, kind in _KINDS.items() if content.startswith(start)), None)
    if kind is None:
        return ""
    title, caption = str(entry.get("title", file.stem)), str(entry.get("caption", ""))
    source = f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"
    wide = "seen" if _tall(content) and not whole_width else "seen wide"
    return (
        f'<figure class="{wide}"><h4>{escape(title)}</h4><div class="scroll"><img alt="{escape(title)}" src="{source}">'
        f"</div><figcaption>{escape(caption)}</figcaption></figure>"
    )


def _tall(content: bytes) -> bool:
    """Whether half of the page is enough for a PNG: its width and height stand at the same place in every one."""
    if not content.startswith(b"\x89PNG"):
        return False
    return int.from_bytes(content[16:20], "big") < 1.6 * int.from_bytes(content[20:24], "big")


def _show(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
