"""Parts of a picture: images as tiles, heat maps over them, rows with a heading; and the index of a picture folder."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from batchformer.errors import UserError
from batchformer.mix.normalisation import both_or_none, unit_range

TILE, GAP, MARGIN, HEADING = 160, 10, 28, 46
PAPER, INK, MUTED = (20, 26, 33), (236, 240, 244), (160, 174, 189)
LESS, MORE = (64, 140, 255), (255, 158, 44)
_GROUND = np.full((1, 1, 1), 58, dtype=np.float32)


def to_pictures(
    images: Float[Tensor, "batch channel height width"],
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> list[Image.Image]:
    """Model inputs as pictures. Without mean and std each image is scaled from its own minimum to its maximum."""
    if not isinstance(images, Tensor):
        raise UserError(f"images must be one tensor with the whole batch, not {type(images).__name__}.")
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise UserError(f"images of the shape {tuple(images.shape)} cannot be drawn: (batch, 1 or 3, height, width).")
    x = unit_range(images.cpu(), *both_or_none("pictures", mean, std)).expand(-1, 3, -1, -1)
    pixels = (x * 255).round().byte().permute(0, 2, 3, 1).numpy()
    return [Image.fromarray(each) for each in pixels]


def fit(picture: Image.Image, size: int = TILE) -> Image.Image:
    """The picture with its longer side of this length; small ones with their pixels visible."""
    scale = size / max(picture.size)
    wanted = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    smooth = Image.Resampling.NEAREST if scale >= 2.5 else Image.Resampling.LANCZOS
    return picture.convert("RGB").resize(wanted, smooth)


def tile(picture: Image.Image, size: int = TILE) -> Image.Image:
    """The whole picture in the middle of a square of this size."""
    sheet, fitted = Image.new("RGB", (size, size), PAPER), fit(picture, size)
    sheet.paste(fitted, corner(fitted, size))
    return sheet


def corner(fitted: Image.Image, size: int = TILE) -> tuple[int, int]:
    """Top left corner of a fitted picture on its tile."""
    return (size - fitted.width) // 2, (size - fitted.height) // 2


def heat_over(picture: Image.Image, mass: Float[Tensor, "row column"], limit: float) -> Image.Image:
    """The picture in grey, tinted where `mass` is off 1: `MORE` above, `LESS` below, full at a factor of 2^limit."""
    level = np.log2(np.clip(mass.numpy().astype(np.float32), 1e-6, None)) / limit
    return _over(picture, level, -1)


def light_over(picture: Image.Image, share: Float[Tensor, "row column"]) -> Image.Image:
    """The picture in grey, tinted with `MORE` by `share`, between 0 and 1."""
    return _over(picture, share.numpy().astype(np.float32), 0)


def tint(factor: float, limit: float) -> tuple[int, int, int]:
    """The tint of `heat_over` on a plain ground."""
    level = np.clip(np.log2(np.float32(max(factor, 1e-6))) / limit, -1, 1)
    red, green, blue = _tinted(_GROUND, np.full((1, 1, 1), level, dtype=np.float32))[0, 0].tolist()
    return red, green, blue


def colour_map(colours: Float[Tensor, "row column 3"], size: tuple[int, int]) -> Image.Image:
    pixels = (colours.clamp(0, 1) * 255).round().byte().numpy()
    return Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST)


def contact_sheet(rows: Sequence[tuple[str, Sequence[Image.Image]]]) -> Image.Image:
    """Rows of tiles, each under its heading (torchvision's `make_grid` has none)."""
    columns = max(len(tiles) for _, tiles in rows)
    headings = max(text_width(heading, 26) for heading, _ in rows)
    width = 2 * MARGIN + max(columns * (TILE + GAP) - GAP, headings)
    heights = [HEADING + max(each.height for each in tiles) + GAP for _, tiles in rows]
    sheet, top = blank(width, MARGIN + sum(heights)), MARGIN // 2
    for (heading, tiles), height in zip(rows, heights, strict=True):
        text(sheet, (MARGIN, top + HEADING // 2), heading, 26, INK, "lm")
        for c, each in enumerate(tiles):
            sheet.paste(each, (MARGIN + c * (TILE + GAP), top + HEADING))
        top += height
    return sheet


def captioned(shown: Image.Image, words: str, fill: tuple[int, int, int] = INK) -> Image.Image:
    """A tile with a line of text below it, cut where it is too long."""
    size = 18
    while text_width(words, size) > shown.width and len(words) > 1:
        words = f"{words.removesuffix('…')[:-1]}…"
    sheet = blank(shown.width, shown.height + size + 8)
    sheet.paste(shown)
    text(sheet, (shown.width / 2, shown.height + 4 + size / 2), words, size, fill)
    return sheet


def blank(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height), PAPER)


def text(
    sheet: Image.Image, at: tuple[float, float], words: str, size: int, fill: tuple[int, int, int], anchor: str = "mm"
) -> None:
    ImageDraw.Draw(sheet).text(at, words, fill=fill, font=ImageFont.load_default(size), anchor=anchor)


def text_width(words: str, size: int) -> int:
    return math.ceil(ImageFont.load_default(size).getlength(words))


def scale_bar(sheet: Image.Image, left: int, top: int, width: int, limit: float) -> None:
    """Draw the colour scale of `heat_over`."""
    height = 16
    level = np.broadcast_to(np.linspace(-1, 1, width, dtype=np.float32)[None, :, None], (height, width, 1))
    sheet.paste(Image.fromarray(_tinted(_GROUND, level)), (left, top))
    middle, factor = top + height + 16, 2**limit
    text(sheet, (left, middle), f"{1 / factor:.2f}x", 20, MUTED, "lm")
    text(sheet, (left + width / 2, middle), "as by chance", 20, MUTED)
    text(sheet, (left + width, middle), f"{factor:.2f}x", 20, MUTED, "rm")


def limit_of(mass: Tensor) -> float:
    """The factor of the strongest tint, as a power of two: nearly the largest of these maps, never below 0.1375."""
    if not bool(mass.isfinite().all()):
        raise UserError("there is NaN in the attention: what the model makes of these images is not finite.")
    logs = mass.clamp_min(1e-6).log2().abs().flatten()
    return max(0.1375, math.ceil(logs.quantile(0.995).item() * 20) / 20)


def _over(picture: Image.Image, level: np.ndarray, lowest: float) -> Image.Image:
    """The picture in grey under the tint of a map between `lowest` and 1, drawn smoothly, which may overshoot."""
    stretched = Image.fromarray(level).resize(picture.size, Image.Resampling.BICUBIC)
    level = np.clip(np.asarray(stretched, dtype=np.float32), lowest, 1)[..., None]
    grey = np.asarray(picture.convert("L"), dtype=np.float32)[..., None] * 0.45 + 45
    return Image.fromarray(_tinted(grey, level))


def _tinted(ground: np.ndarray, level: np.ndarray) -> np.ndarray:
    """The ground mixed with `MORE` where the level is above zero, with `LESS` where it is below."""
    colour = np.where(level > 0, np.array(MORE, dtype=np.float32), np.array(LESS, dtype=np.float32))
    strength = np.abs(level) * 0.85
    return (ground * (1 - strength) + colour * strength).round().astype(np.uint8)


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
            picture.save(folder / file, optimize=True, quality=88)  # PNG has no quality
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
