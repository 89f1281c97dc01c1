"""The pictures: attention mass (V2, Figs. 5 and 10) and table, features (8); Grad-CAM (BatchFormer, Fig. 5)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from PIL import Image, ImageDraw
from torch import Tensor, nn

from batchformer.analysis.batch_attention import AttentionOverBatch, attention_over_batch
from batchformer.analysis.drawing import (
    HEADING,
    INK,
    LESS,
    MARGIN,
    MORE,
    MUTED,
    blank,
    captioned,
    colour_map,
    contact_sheet,
    corner,
    fit,
    heat_over,
    light_over,
    limit_of,
    scale_bar,
    text,
    tile,
    tint,
    to_pictures,
    write_index,
)
from batchformer.analysis.features import FeaturePair, features_with_and_without
from batchformer.errors import UserError

MOST_SHOWN = 8
Position = int | tuple[int, int]

MASS_CAPTION = (
    "Mean over the heads, {images}. Orange: the others look here more than by chance (uniform attention); blue: "
    "less. At one place the images compete: what one gets, another lacks."
)
TABLE_CAPTION = (
    "At {position}, counted from 0: how many times more than by chance the image of a row looks at a column's. "
    "{images} of one batch."
)
FEATURES_CAPTION = (
    "Three principal components as red, green and blue, one scale for both rows: equal features have equal colours."
)
PLANE_CAPTION = "The mean token of each image, in the plane of the first two principal components, one scale for both."


def draw_attention_masses(attentions: Mapping[str, AttentionOverBatch], pictures: Sequence[Image.Image]) -> Image.Image:
    """Images, and below each the attention of the other samples to it: orange above uniform, blue below.

    One row for each insertion under its heading, with one scale of colours.
    """
    maps = {heading: attention.mass_map() for heading, attention in attentions.items()}
    limit = limit_of(torch.cat([each.flatten() for each in maps.values()]))
    shown = shown_of(len(pictures))
    rows = [("what the model is shown", [tile(pictures[k]) for k in shown])]
    rows += [
        (heading, [tile(heat_over(fit(pictures[k]), each[k], limit)) for k in shown]) for heading, each in maps.items()
    ]
    sheet = contact_sheet(rows)
    tall = blank(max(sheet.width, 560), sheet.height + 70)
    tall.paste(sheet)
    scale_bar(tall, MARGIN, sheet.height + 4, min(400, tall.width - 2 * MARGIN), limit)
    return tall


def draw_who_looks_at_whom(
    attention: AttentionOverBatch, pictures: Sequence[Image.Image], position: Position
) -> Image.Image:
    """A table of the attention of each image (row) to each image (column) at the position marked.

    Cells are multiples of uniform attention over the visible samples.
    """
    shown, cell = shown_of(len(pictures)), 96
    factors, count = attention.factors(position)[shown][:, shown], len(shown)
    tiles = [_marked(tile(pictures[k], cell), attention, position, pictures[k]) for k in shown]
    side = cell + 8
    left, top = MARGIN + side + 12, MARGIN + HEADING + side + 12
    bottom = top + count * side
    sheet = blank(max(left + count * side + MARGIN, 560), bottom + 80)
    text(sheet, (left, MARGIN + HEADING // 2 - 6), "is looked at", 26, INK, "lm")
    text(sheet, (MARGIN, MARGIN + HEADING + side // 2), "looks", 26, INK, "lm")
    limit = limit_of(factors)
    pen = ImageDraw.Draw(sheet)
    for i in range(count):
        sheet.paste(tiles[i], (left + i * side, MARGIN + HEADING))
        sheet.paste(tiles[i], (MARGIN, top + i * side))
        for j in range(count):
            factor = factors[i, j].item()
            corner = (left + j * side, top + i * side)
            fill = tint(factor, limit)
            pen.rectangle((*corner, corner[0] + cell, corner[1] + cell), fill=fill)
            ink = (12, 16, 20) if sum(fill) > 380 else INK
            text(sheet, (corner[0] + cell / 2, corner[1] + cell / 2), f"{factor:.2f}", 24, ink)
    scale_bar(sheet, left, bottom + 14, min(400, sheet.width - left - MARGIN), limit)
    return sheet


def draw_features(features: FeaturePair, pictures: Sequence[Image.Image]) -> Image.Image:
    """Fig. 8: images, features of the plain model, features with the module; equal features have equal colours.

    Maps of padded images are cut to what is image, which is what the pictures must show.
    """
    shown = shown_of(len(pictures))
    rows = [("what the model is shown", [tile(pictures[k]) for k in shown])]
    for heading, maps in zip(("without", "with"), features.colours(), strict=True):
        cut = list(maps)
        if features.inside is not None:
            cut = [one[: i.any(1).sum(), : i.any(0).sum()] for one, i in zip(maps, features.inside, strict=True)]
        rows.append(
            (f"features {heading} the module", [tile(colour_map(cut[k], fit(pictures[k]).size)) for k in shown])
        )
    return contact_sheet(rows)


def draw_grad_cam(
    maps: Mapping[str, Float[Tensor, "batch row column"]],
    pictures: Sequence[Image.Image],
    classes: Sequence[str] | None = None,
    predicted: Mapping[str, Sequence[str]] | None = None,
) -> Image.Image:
    """Fig. 5: the images, and below them a row for each model by its name; bright is where the evidence lies.

    With `classes` their names are below the images, and below each map what the model says, orange where it is wrong.
    """
    shown = shown_of(len(pictures))
    plain, rows = [tile(pictures[k]) for k in shown], []
    if classes is not None:
        plain = [captioned(each, classes[k]) for each, k in zip(plain, shown, strict=True)]
    rows.append(("images", plain))
    for name, evidence in maps.items():
        tiles = [tile(light_over(fit(pictures[k]), evidence[k])) for k in shown]
        if classes is not None and predicted is not None:
            words = predicted[name]
            colours = [MUTED if words[k] == classes[k] else MORE for k in shown]
            tiles = [captioned(each, words[k], c) for each, k, c in zip(tiles, shown, colours, strict=True)]
        rows.append((name, tiles))
    return contact_sheet(rows)


def draw_plane(features: FeaturePair, labels: Sequence[int] | None = None) -> Image.Image:
    """Each sample as a point without the module (ring) and with it (disc), a line between; colours are the classes.

    Both directions have one scale: a line twice as long is a move twice as far.
    """
    size = 1000, 1040
    without, related = features.plane()
    if labels is not None:
        labels = labels.tolist() if hasattr(labels, "tolist") else list(labels)
        if len(labels) != len(without):
            raise UserError(f"{len(labels)} labels for {len(without)} images: one for each.")
    starts, ends = on_sheet(torch.cat([without, related]), size).chunk(2)
    sheet = blank(size[0], size[1] + 50)
    classes = sorted(set(labels)) if labels is not None else [0]
    for k in range(len(without)):
        colour = _class_colour(classes.index(labels[k]) if labels is not None else 0, len(classes))
        start, end = starts[k].tolist(), ends[k].tolist()
        pen = ImageDraw.Draw(sheet)
        pen.line((*start, *end), fill=tuple(c // 2 for c in colour), width=2)
        pen.ellipse(_around(start, 8), outline=colour, width=3)
        pen.ellipse(_around(end, 8), fill=colour)
    pen, level = ImageDraw.Draw(sheet), size[1] + 20
    pen.ellipse(_around((MARGIN + 10, level), 8), outline=INK, width=3)
    text(sheet, (MARGIN + 30, level), "without the module", 22, MUTED, "lm")
    pen.ellipse(_around((MARGIN + 280, level), 8), fill=INK)
    text(sheet, (MARGIN + 300, level), "with the module", 22, MUTED, "lm")
    return sheet


def on_sheet(points: Float[Tensor, "point 2"], size: tuple[int, int]) -> Float[Tensor, "point 2"]:
    """Points of a plane in pixels of a sheet of this width and height, as large as fits."""
    low, high = points.amin(0), points.amax(0)
    inside = torch.tensor(size) - 2.0 * (MARGIN + 10)
    scale = (inside / (high - low).clamp_min(1e-12)).amin()
    return (points - (low + high) / 2) * scale * torch.tensor([1, -1]) + torch.tensor(size) / 2


def write_pictures(
    folder: Path | str,
    model: nn.Module,
    images: Float[Tensor, "batch channel height width"],
    *,
    place: int | str = 0,
    position: Position | None = None,
    labels: Sequence[int] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> list[Path]:
    """All pictures that can be drawn at one insertion, as PNG files with an index that `batchformer report` reads.

    Args:
        folder: `pictures` in a run folder is where the report looks.
        position: for "who looks at whom"; None: the middle of the grid, else the first position.
        labels: classes of the images, for colours.
        mean, std: by which the images were normalised.
    """
    pictures = to_pictures(images, mean, std)
    attention = attention_over_batch(model, images, place)
    features = features_with_and_without(model, images, place)
    grid = attention.layout.grid
    position = position if position is not None else 0 if grid is None else (grid[0] // 2, grid[1] // 2)
    named = "row {}, column {}".format(*position) if isinstance(position, tuple | list) else f"position {position}"
    count, shown = len(images), len(shown_of(len(images)))
    several = f"{count} images" if shown == count else f"{shown} of {count} images"
    made = []
    if grid is not None and grid != (1, 1):
        mass = draw_attention_masses({"where the other samples look, at the same place": attention}, pictures)
        made.append(("attention-mass.png", mass, "Attention to the other samples", MASS_CAPTION.format(images=several)))
        maps = draw_features(features, pictures)
        made.append(("features.png", maps, "Features without and with the module", FEATURES_CAPTION))
    table = draw_who_looks_at_whom(attention, pictures, position)
    caption = TABLE_CAPTION.format(position=named, images=several)
    made.append(("who-looks-at-whom.png", table, "Attention between the images", caption))
    made.append(("plane.png", draw_plane(features, labels), "How far the module moves each image", PLANE_CAPTION))
    where = f"{attention.side.capitalize()} {attention.path!r}."
    made = [(name, picture, title, f"{where} {caption}") for name, picture, title, caption in made]
    return write_index(folder, made, keep=False)


def shown_of(count: int) -> list[int]:
    """Indices of the images to draw: evenly spread, so that images sorted by class show all classes."""
    shown = min(count, MOST_SHOWN)
    return [k * count // shown for k in range(shown)]


def _marked(shown: Image.Image, attention: AttentionOverBatch, position: Position, picture: Image.Image) -> Image.Image:
    """The tile with a frame around the patch of the position."""
    layout = attention.layout
    index = layout.index(position)
    if layout.grid is None or index < layout.prefix:
        return shown
    row, column = divmod(index - layout.prefix, layout.grid[1])
    fitted = fit(picture, shown.width)
    width, height = fitted.width / layout.grid[1], fitted.height / layout.grid[0]
    left, top = corner(fitted, shown.width)
    left, top = round(left + column * width), round(top + row * height)
    marked = shown.copy()
    ImageDraw.Draw(marked).rectangle(
        (left - 1, top - 1, left + round(width), top + round(height)), outline=MORE, width=3
    )
    return marked


def _class_colour(number: int, count: int) -> tuple[int, int, int]:
    """Colours around the circle, light enough for the dark sheet."""
    import colorsys

    if count == 1:
        return LESS
    red, green, blue = colorsys.hls_to_rgb(number / count, 0.66, 0.75)
    return round(red * 255), round(green * 255), round(blue * 255)


def _around(point: Sequence[float], radius: float) -> tuple[float, float, float, float]:
    return point[0] - radius, point[1] - radius, point[0] + radius, point[1] + radius
