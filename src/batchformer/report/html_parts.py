"""Pieces of the page that several sections use: figures with legends, tables, and pictures of a run folder.

Everything that comes from a file goes through `escape` here or where it is put in.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from batchformer.errors import UserError
from batchformer.files import read_json
from batchformer.report.runs import Run

PICTURES, INDEX = "pictures", "pictures.json"
_KINDS = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg"}
_SAMPLES = {
    "bar": '<rect class="bar {}" x="6" width="14" height="12"/>',
    "band": '<rect class="band {}" width="26" height="12"/>',
    "line": '<polyline class="line {}" points="0,6 26,6"/>',
    "whisker": '<line class="whisker {}" x1="2" y1="6" x2="24" y2="6"/>',
    "dot": '<circle class="dot {}" cx="13" cy="6" r="3.4"/>',
}
_MOST_BYTES = 4 * 2**20


def figure(title: str, picture: str, caption: str, legend: Mapping[str, str] | None = None, tall: bool = False) -> str:
    """A picture with its heading; `legend` maps a style of the marks to its name; `tall`: beside two other figures."""
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    kind = ' class="tall"' if tall else ""
    return f"<figure{kind}><h4>{escape(title)}</h4>{legend_of(legend or {}, picture)}{picture}{below}</figure>"


def missing(what: str, remedy: str) -> str:
    """In place of a picture that cannot be drawn: why, and how to get it."""
    return f'<p class="card muted missing">{escape(what)}; to get it, {marked(remedy)}.</p>'


def marked(text: str) -> str:
    """Text as HTML, with backticks as code."""
    pieces = [escape(piece) for piece in text.split("`")]
    return "".join(f"<code>{piece}</code>" if k % 2 else piece for k, piece in enumerate(pieces))


def legend_of(names: Mapping[str, str], picture: str) -> str:
    """Class name of the marks -> what they stand for; beside each name the marks that the picture has of that style."""
    items = ""
    for style, name in names.items():
        kinds = [kind for kind in _SAMPLES if re.search(rf'class="{kind} {style}[ "]', picture)]
        marks = "".join(_SAMPLES[kind].format(style) for kind in kinds)
        items += f'<li><svg viewBox="0 0 26 12" aria-hidden="true">{marks}</svg>{escape(name)}</li>' if marks else ""
    return f'<ul class="legend">{items}</ul>' if items else ""


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """A table of text in a frame that scrolls; the first column names the row."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
        if row
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<div class="scroll"><table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def pictures_of(runs: Sequence[Run], folder: str, whole_width: bool = False) -> str:
    """The pictures that `analysis` left in that folder of the first run that has it, inside the page."""
    for run in runs:
        index = run.source.parent / folder / INDEX
        if run.source.name == "result.json" and index.is_file():
            entries = read_json(index, "is damaged", "delete it or draw the pictures again")
            listed = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
            if not listed or not all(isinstance(entry.get("file"), str) for entry in entries):
                raise UserError(
                    f"{index} is not an index of pictures: it must list objects with 'file', 'title' and 'caption'"
                )
            drawn = "".join(_picture(index.parent, entry, whole_width) for entry in entries)
            return f'<div class="grid">{drawn}</div>' if drawn else ""
    return ""


def _picture(folder: Path, entry: Mapping[str, str], whole_width: bool) -> str:
    file = folder / entry["file"]
    if file.resolve().parent != folder.resolve() or not file.is_file() or file.stat().st_size > _MOST_BYTES:
        return ""
    content = file.read_bytes()
    kind = next((kind for start, kind in _KINDS.items() if content.startswith(start)), None)
    if kind is None:
        return ""
    title, caption = str(entry.get("title", file.stem)), str(entry.get("caption", ""))
    source = f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"
    # half of the page is enough for a tall PNG: width and height stand at the same place in every one
    width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
    wide = "seen" if kind == "png" and width < 1.6 * height and not whole_width else "seen wide"
    return (
        f'<figure class="{wide}"><h4>{escape(title)}</h4><div class="scroll"><img alt="{escape(title)}" src="{source}">'
        f"</div><figcaption>{escape(caption)}</figcaption></figure>"
    )
