"""Pictures in a folder, and beside them the index by which `batchformer report` finds them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from batchformer.errors import UserError

INDEX = "pictures.json"


def write_index(
    folder: Path | str, made: Sequence[tuple[str, Image.Image, str, str]], *, keep: bool = True
) -> list[Path]:
    """Save pictures (file, picture, title, caption) and list them; the folder is made where it is missing.

    With `keep`, pictures that are listed there already and not drawn anew stay listed.
    """
    folder = Path(folder)
    index = folder / INDEX
    new = {file: {"file": file, "title": title, "caption": caption} for file, _, title, caption in made}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        earlier = _listed(index) if keep else []
        for file, picture, _, _ in made:
            picture.save(folder / file, optimize=True)
        entries = [*new.values(), *(entry for entry in earlier if entry["file"] not in new)]
        index.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder} cannot be written to as a folder: {error.strerror or error}.") from None
    return [folder / file for file in new]


def _listed(index: Path) -> list[dict[str, str]]:
    if not index.is_file():
        return []
    try:
        known = json.loads(index.read_text(encoding="utf-8"))
        return [entry for entry in known if isinstance(entry["file"], str)]
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{index} is not an index of pictures: delete it, or write to another folder.") from None
