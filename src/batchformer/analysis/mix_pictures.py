"""Pictures of mixed images, like Fig. 1 of the TransMix supplement: both images, the mixed one, attention, labels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image, ImageDraw
from torch import Tensor

from batchformer.analysis.drawing import (
    GAP,
    HEADING,
    INK,
    LESS,
    MARGIN,
    MORE,
    MUTED,
    TILE,
    blank,
    fit,
    heat_over,
    limit_of,
    text,
    tile,
    to_pictures,
    write_index,
)
from batchformer.errors import UserError
from batchformer.mix.base import Mixed
from batchformer.mix.transmix import TransMixed

FILE = "mixed.png"
LABELS_WIDTH = 420
CAPTION = "Blue: image A, orange: image B. The bars show the label shares by area and in the training target."
ATTENTION_CAPTION = (
    "In the attention map orange is looked at more than by chance, blue less. Attention: how much of it lies on image "
    "B's part; the target lies between it and the area."
)


def draw_mixed(
    mixed: Mixed,
    images: Float[Tensor, "batch channel height width"],
    names: Sequence[str] | None = None,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    most: int = 6,
) -> Image.Image:
    """A row for each mixed image: A, B, the mixture, the attention where there is one, and the shares of both labels.

    Args:
        mixed: what a mix made of the images; for TransMix after the forward pass.
        images: the images it was given.
        names: of the images' classes, one for each image.
        mean, std: by which the images were normalised.
        most: rows to draw.
    """
    if len(images) != len(mixed):
        raise UserError(f"{len(mixed)} mixed images and {len(images)} to compare them with: pass the batch mixed.")
    count = min(len(mixed), most)
    partner = mixed.partner.tolist()
    # one value range for all, so that mixed images look like the images they come from
    every = to_pictures(torch.cat([images, mixed.images]), mean, std)
    originals, mixtures = every[: len(images)], every[len(images) :]
    attention = mixed.attention() if isinstance(mixed, TransMixed) else None
    shares = label_shares(mixed)
    columns = ["image A", "image B", "mixed", *(["attention"] if attention is not None else []), "share in the label"]
    left = MARGIN + (len(columns) - 1) * (TILE + GAP)
    sheet = blank(left + LABELS_WIDTH + MARGIN, MARGIN + HEADING + count * (TILE + GAP))
    for column, heading in enumerate(columns):
        text(sheet, (MARGIN + column * (TILE + GAP), MARGIN), heading, 24, INK, "lm")
    heat = None if attention is None else attention.float().cpu() * attention[0].numel()
    limit = 0.0 if heat is None else limit_of(heat[:count])
    for row in range(count):
        top = MARGIN // 2 + HEADING + row * (TILE + GAP)
        tiles = [tile(originals[row]), tile(originals[partner[row]]), tile(mixtures[row])]
        if heat is not None:
            tiles.append(tile(heat_over(fit(mixtures[row]), heat[row], limit)))
        for column, each in enumerate(tiles):
            sheet.paste(each, (MARGIN + column * (TILE + GAP), top))
        pair = ("A", "B") if names is None else (names[row], names[partner[row]])
        _draw_shares(sheet, left, top, pair, {name: share[row].item() for name, share in shares.items()})
    return sheet


def label_shares(mixed: Mixed) -> dict[str, Float[Tensor, " batch"]]:
    """Image B's share by area, by attention alone where there is attention, and in the targets."""
    shares = {"area": mixed.share}
    if isinstance(mixed, TransMixed):
        shares["attention"] = mixed.attention_share()
    return {**shares, "target": mixed.label_share()}


def write_mix_picture(
    folder: Path | str, mixed: Mixed, images: Float[Tensor, "batch channel height width"], **options: Any
) -> Path:
    """The picture as a PNG with an index beside it; `mixing` in a run folder is where `batchformer report` looks.

    `method`, a name for the heading, and the options of `draw_mixed`.
    """
    method = options.pop("method", type(mixed).__name__.removesuffix("ed"))
    picture = draw_mixed(mixed, images, **options)
    caption = f"{CAPTION} {ATTENTION_CAPTION}" if isinstance(mixed, TransMixed) else CAPTION
    (path,) = write_index(folder, [(FILE, picture, f"{method}: images and labels", caption)], keep=False)
    return path


def _draw_shares(sheet: Image.Image, left: int, top: int, pair: tuple[str, str], shares: dict[str, float]) -> None:
    """A bar for each assignment: image A's part from the left, image B's from the right."""
    pen, name_width, high = ImageDraw.Draw(sheet), 110, 30
    begin, wide = left + name_width, LABELS_WIDTH - name_width
    text(sheet, (begin, top + 14), _short(pair[0]), 20, LESS, "lm")
    text(sheet, (begin + wide, top + 14), _short(pair[1]), 20, MORE, "rm")
    for k, (name, share) in enumerate(shares.items()):
        y = top + 34 + k * (high + 10)
        middle = begin + round(wide * (1 - share))
        text(sheet, (left, y + high // 2), name, 20, MUTED, "lm")
        if middle > begin:
            pen.rectangle((begin, y, middle - 1, y + high), fill=LESS)
        if middle < begin + wide:
            pen.rectangle((middle, y, begin + wide - 1, y + high), fill=MORE)
        for at, part, anchor in ((begin + 8, 1 - share, "lm"), (begin + wide - 8, share, "rm")):
            if part > 0.2:
                text(sheet, (at, y + high // 2), f"{part:.2f}", 20, (12, 16, 20), anchor)


def _short(name: str) -> str:
    return name if len(name) <= 13 else name[:12] + "…"
