"""Pictures of mistakes: images with their predicted and their true classes."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from batchformer.analysis.drawing import GAP, MARGIN, MORE, TILE, blank, captioned, tile, write_index

Mistake = tuple[Image.Image, str, str]  # image, what the network said, what it is
FILE = "mistakes.png"
_COLUMNS, _WIDTH = 4, TILE + 60


def draw_mistakes(mistakes: Sequence[Mistake]) -> Image.Image:
    """Tiles in rows of four, below each the predicted and the true class."""
    tiles = []
    for image, said, truth in mistakes:
        wide = blank(_WIDTH, TILE)
        wide.paste(tile(image), ((_WIDTH - TILE) // 2, 0))
        tiles.append(captioned(captioned(wide, f"said: {said}", MORE), f"is: {truth}"))
    rows, height = -(-len(mistakes) // _COLUMNS), max((each.height for each in tiles), default=0) + GAP
    sheet = blank(2 * MARGIN + _COLUMNS * (_WIDTH + GAP) - GAP, 2 * MARGIN + rows * height - GAP)
    for k, each in enumerate(tiles):
        sheet.paste(each, (MARGIN + k % _COLUMNS * (_WIDTH + GAP), MARGIN + k // _COLUMNS * height))
    return sheet


def write_mistakes(folder: Path, mistakes: Sequence[Mistake]) -> list[Path]:
    """The picture and its index, for the page; nothing where there is no mistake."""
    if not mistakes:
        return []
    caption = "One image of each of the most frequent confusions on the test set."
    return write_index(folder, [(FILE, draw_mistakes(mistakes), "Images it gets wrong", caption)], keep=False)
