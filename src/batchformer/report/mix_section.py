"""What was mixed, on the page of a run: the picture that `analysis.mix_pictures` left in its folder."""

from __future__ import annotations

from collections.abc import Sequence

from batchformer.report.runs import Run
from batchformer.report.stream_sections import INDEX, picture_of, pictures_in

FOLDER = "mixing"


def mix_section(runs: Sequence[Run]) -> str:
    """The picture of the first run that has one; nothing where there is none."""
    for run in runs:
        index = run.source.parent / FOLDER / INDEX
        if run.source.name == "result.json" and index.is_file():
            drawn = "".join(picture_of(index.parent, entry) for entry in pictures_in(index))
            return f'<h3>Mixing</h3><div class="grid">{drawn}</div>' if drawn else ""
    return ""
