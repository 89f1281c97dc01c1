"""What a detector finds, on the page of a run: the pictures that `analysis.detection_pictures` left in its folder."""

from __future__ import annotations

from collections.abc import Sequence

from batchformer.report.runs import Run
from batchformer.report.stream_sections import INDEX, picture_of, pictures_in

FOLDER = "detection"


def detection_section(runs: Sequence[Run]) -> str:
    """The pictures of the first run that has them; nothing where there are none."""
    for run in runs:
        index = run.source.parent / FOLDER / INDEX
        if run.source.name == "result.json" and index.is_file():
            drawn = "".join(picture_of(index.parent, entry, whole_width=True) for entry in pictures_in(index))
            return f'<h3>What is found in the images</h3><div class="grid">{drawn}</div>' if drawn else ""
    return ""
