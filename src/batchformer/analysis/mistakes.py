"""Pictures of mistakes: images with what a network said and what they are."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from batchformer.analysis.drawing import GAP, INK, MARGIN, MORE, MUTED, TILE, blank, text, text_width, tile, write_index

Mistake = tuple[Image.Image, str, str]  # image, what the network said, what it is
FILE = "mistakes.png"
_COLUMNS, _LINE, _SIZE = 4, 24, 18
_WIDTH = TILE + 60


def draw_mistakes(mistakes: Sequence[Mistake]) -> Image.Image:
    """Tiles in rows of four, below each what was said and what is right."""
    rows = -(-len(mistakes) // _COLUMNS)
    height = TILE + 2 * _LINE + GAP
    sheet = blank(2 * MARGIN + _COLUMNS * (_WIDTH + GAP) - GAP, 2 * MARGIN + rows * height - GAP)
    for k, (image, said, truth) in enumerate(mistakes):
        left, top = MARGIN + k % _COLUMNS * (_WIDTH + GAP), MARGIN + k // _COLUMNS * height
        sheet.paste(tile(image), (left + (_WIDTH - TILE) // 2, top))
        for line, (words, colour) in enumerate(((f"said: {said}", MORE), (f"is: {truth}", INK))):
            at = (left + _WIDTH / 2, top + TILE + (line + 0.6) * _LINE)
            text(sheet, at, _shortened(words), _SIZE, colour if words else MUTED)
    return sheet


def write_mistakes(folder: Path, mistakes: Sequence[Mistake]) -> list[Path]:
    """The picture and its index, for the page; nothing where there is no mistake."""
    if not mistakes:
        return []
    caption = "One image of each of the most frequent confusions on the test set."
    return write_index(folder, [(FILE, draw_mistakes(mistakes), "Images it gets wrong", caption)], keep=False)


def _shortened(words: str) -> str:
    while text_width(words, _SIZE) > _WIDTH:
        words = words[:-2].rstrip("…") + "…"
    return words
