"""Draw boxes or segments on an image, with class names and scores that are readable at any size.

Segments are torchvision's. Names are ours: torchvision's `draw_bounding_boxes` has one small font without a font file,
lets names overlap and cuts them off at the border; without names its boxes are the rectangles drawn here.
"""

import colorsys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo
from torchvision.transforms.v2.functional import pil_to_tensor, to_dtype, to_pil_image
from torchvision.utils import draw_segmentation_masks

from batchformer.files import refuse_to_replace, write_atomically

Colour = tuple[int, int, int]

_READABLE = 480  # pixels of the longer side below which names would cover what they name
_GOLDEN_RATIO = 0.61803398875
_OPACITY = 0.55  # of the tint of a segment
_EDGE = 245 / 255  # grey of the line around it
_DARK: Colour = (12, 16, 20)
_LIGHT: Colour = (255, 255, 255)


def draw_boxes(
    picture: Image.Image,
    boxes: Float[np.ndarray, "boxes 4"],
    labels: Sequence[int],
    names: Sequence[str],
    scores: Sequence[float] | None = None,
) -> Image.Image:
    """Draw boxes (x1, y1, x2, y2 in pixels of the picture) in the colours of their classes, the highest score on top.

    Small pictures are enlarged by a whole factor, so that there is room for names.
    """
    sheet, factor = _enlarged(picture)
    pen, thick = ImageDraw.Draw(sheet), max(2, round(max(sheet.size) / 250))
    order = sorted(range(len(boxes)), key=lambda k: 0.0 if scores is None else scores[k])
    corners = np.asarray(boxes, dtype=np.float64).reshape(-1, 4) * factor
    for k in order:
        x1, y1, x2, y2 = _inside(corners[k], sheet)
        pen.rectangle((x1, y1, x2, y2), outline=class_colour(labels[k]), width=thick)
    taken: list[tuple[int, int, int, int]] = []
    for k in reversed(order):  # captions are placed by falling score
        x1, y1, _, _ = _inside(corners[k], sheet)
        _draw_caption(
            sheet, (x1, y1), _caption(names[labels[k]], None if scores is None else scores[k]), labels[k], taken
        )
    return sheet


def draw_segments(
    picture: Image.Image,
    segmentation: Int[np.ndarray, "height width"],
    segments: Sequence[Mapping[str, Any]],
    names: Sequence[str],
) -> Image.Image:
    """Draw a segmentation over the picture: each segment tinted in its class's colour, with an edge and its name.

    `segments` list `id`, `label_id` and, if there is one, `score`; other ids are void and stay as they are. Segments of
    one class differ in lightness.
    """
    sheet, factor = _enlarged(picture)
    ids = np.asarray(segmentation)
    colours: dict[int, Colour] = {}
    before: dict[int, int] = {}
    for segment in segments:
        label = int(segment["label_id"])
        before[label] = before.get(label, -1) + 1
        colours[int(segment["id"])] = class_colour(label, before[label])
    large = np.asarray(Image.fromarray(ids.astype(np.int32)).resize(sheet.size, Image.Resampling.NEAREST))
    pixels = to_dtype(pil_to_tensor(sheet), scale=True)  # floats: torchvision cuts bytes down instead of rounding
    if colours:
        masks = torch.from_numpy(large == np.array(list(colours))[:, None, None])
        pixels = draw_segmentation_masks(pixels, masks, alpha=_OPACITY, colors=list(colours.values()))
    edge = np.zeros(large.shape, dtype=bool)
    edge[:, 1:] |= large[:, 1:] != large[:, :-1]
    edge[1:] |= large[1:] != large[:-1]
    pixels[:, torch.from_numpy(edge)] = _EDGE
    sheet = as_image(pixels)
    taken: list[tuple[int, int, int, int]] = []
    areas = {identity: int((ids == identity).sum()) for identity in colours}
    for segment in sorted(segments, key=lambda one: -areas[int(one["id"])]):
        if areas[int(segment["id"])]:
            x, y = _point_inside(ids == int(segment["id"]))
            caption = _caption(names[segment["label_id"]], segment.get("score"))
            _draw_caption(sheet, (x * factor, y * factor), caption, int(segment["label_id"]), taken, centred=True)
    return sheet


def as_image(pixels: Float[torch.Tensor, "3 height width"]) -> Image.Image:
    """From values between 0 and 1."""
    return to_pil_image((pixels * 255).round().byte().cpu())


def class_colour(label: int, repeat: int = 0) -> Colour:
    """Colour of a class: neighbouring labels get distant hues; the second, third object of a class is darker."""
    light = 0.62 - 0.13 * (repeat % 3)
    red, green, blue = colorsys.hls_to_rgb(label * _GOLDEN_RATIO % 1.0, light, 0.85)
    return round(red * 255), round(green * 255), round(blue * 255)


def _enlarged(picture: Image.Image) -> tuple[Image.Image, int]:
    factor = max(1, -(-_READABLE // max(picture.size)))
    size = (picture.width * factor, picture.height * factor)
    smooth = Image.Resampling.NEAREST if factor > 4 else Image.Resampling.BICUBIC
    return picture.convert("RGB").resize(size, smooth) if factor > 1 else picture.convert("RGB"), factor


def _inside(box: np.ndarray, sheet: Image.Image) -> tuple[int, int, int, int]:
    """The corners in whole pixels of the sheet, the second never before the first."""
    x1, y1 = (int(np.clip(round(float(v)), 0, side - 1)) for v, side in zip(box[:2], sheet.size, strict=True))
    x2, y2 = (int(np.clip(round(float(v)) - 1, 0, side - 1)) for v, side in zip(box[2:], sheet.size, strict=True))
    return x1, y1, max(x1, x2), max(y1, y2)


def _caption(name: str, score: float | None) -> str:
    return name if score is None else f"{name} {score:.2f}"


def _draw_caption(
    sheet: Image.Image,
    at: tuple[float, float],
    caption: str,
    label: int,
    taken: list[tuple[int, int, int, int]],
    centred: bool = False,
) -> None:
    """A caption on a rectangle of the class's colour, moved into the sheet, and down where another one is."""
    font = ImageFont.load_default(max(12, round(max(sheet.size) / 34)))
    pen = ImageDraw.Draw(sheet)
    left, top, right, bottom = pen.textbbox((0, 0), caption, font=font)
    wide, high = round(right - left) + 8, round(bottom - top) + 6
    x, y = (at[0] - wide / 2, at[1] - high / 2) if centred else (at[0], at[1] - high)
    if not centred and y < 0:
        y = at[1]
    x = round(min(max(0, x), max(0, sheet.width - wide)))
    y = round(min(max(0, y), max(0, sheet.height - high)))
    start = y
    while any(x < x2 and x1 < x + wide and y < y2 and y1 < y + high for x1, y1, x2, y2 in taken):
        y += high
        if y + high > sheet.height:
            y = start
            break
    taken.append((x, y, x + wide, y + high))
    plate = class_colour(label)
    pen.rectangle((x, y, x + wide, y + high), fill=plate)
    # dark or light, whichever stands out more (WCAG's relative luminance, gamma 2)
    red, green, blue = ((value / 255) ** 2 for value in plate)
    ink = _DARK if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 else _LIGHT
    pen.text((x + 4 - left, y + 3 - top), caption, fill=ink, font=font)


def _point_inside(mask: np.ndarray) -> tuple[float, float]:
    """A point inside the mask: in its middle row, the middle of the longest piece."""
    rows = np.flatnonzero(mask.any(1))
    counts = mask.sum(1)[rows].cumsum()
    row = int(rows[np.searchsorted(counts, counts[-1] / 2)])
    line = np.concatenate([[0], mask[row].astype(np.int8), [0]])
    starts, ends = np.flatnonzero(np.diff(line) == 1), np.flatnonzero(np.diff(line) == -1)
    longest = int((ends - starts).argmax())
    return (starts[longest] + ends[longest]) / 2, row + 0.5


def save_marked(picture: Image.Image, path: Path, command: str) -> None:
    """Write a PNG whose metadata name the command, so that a later call of it may replace the file."""
    note = PngInfo()
    note.add_text("Software", f"batchformer {command}")
    write_atomically(path, lambda file: picture.save(file, "PNG", pnginfo=note))


def refuse_other_picture(path: Path, command: str) -> None:
    """Refuse a picture that is there, unless this command wrote it."""
    refuse_to_replace(path, lambda content: f"batchformer {command}".encode() in content)
