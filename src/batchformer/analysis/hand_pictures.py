"""Pictures of hand meshes: predicted and true from two sides, errors on the surface, batch attention over tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from PIL import Image, ImageDraw
from torch import Tensor

from batchformer.analysis.after_training import attend_locally
from batchformer.analysis.batch_attention import AttentionOverBatch, attention_over_batch
from batchformer.analysis.drawing import (
    LESS,
    MARGIN,
    MORE,
    MUTED,
    blank,
    captioned,
    contact_sheet,
    fit,
    heat_over,
    limit_of,
    scale_bar,
    text,
    tile,
    tint,
    to_pictures,
    write_index,
)
from batchformer.data.drawing import as_image
from batchformer.data.loading.epoch_loader import as_batch
from batchformer.data.rendering import draw_mesh
from batchformer.metrics.hands import align
from batchformer.models.graphormer import fit_camera, project

FOLDER = "meshes"  # in the run folder
WORST = 20.0  # mm of the last colour: the same on all pages, so that runs can be compared
_SHOWN, _BATCH = 6, 32
_FINE = 320  # pixels that are drawn for a tile, which is half of it: smooth edges
_NEUTRAL = (235, 235, 228)


def hand_meshes_of(task: Any, data: Any, trainer: Any) -> dict[str, Any]:
    """Sections with the first test pictures: meshes and errors; with a module also its attention."""
    device, precision = trainer.strategy.root_device, trainer.strategy.precision_plugin
    net = task.net.to(device).eval()
    batch = _first_samples(data.evaluation_loader(task.evaluation_sets[0]), _BATCH)
    images = precision.convert_input(batch["images"].to(device))
    with torch.no_grad(), precision.forward_context():
        found = {name: rows.float().cpu() for name, rows in net(images).items()}
    truth, pictures = task.truth(batch), to_pictures(batch["images"][:_SHOWN], data.mean, data.std)
    faces = torch.as_tensor(task.topology.faces)
    camera = fit_camera(truth["joints"], truth["joints_2d"])
    aligned = align(found["vertices"].double(), truth["vertices"].double(), task.reflect)
    errors = (aligned - truth["vertices"]).norm(dim=-1).float() * 1000
    caption = (
        f"The first {len(pictures)} test pictures, the same for all runs of these data. Side views are from the right "
        "of the hand. Errors in mm after alignment, as in PA-MPVPE; below each picture their mean."
    )
    sheet = draw_hands(pictures, found, truth["vertices"], camera, errors, faces)
    made = [("meshes.jpg", sheet, "Meshes from the camera and from the side, and their errors", caption)]
    section: dict[str, Any] = {"title": "Meshes", "pictures": FOLDER}
    control = trainer.callback_metrics.get("val/pa_mpvpe_mean_pose")
    if control is not None:
        section["text"] = (
            f"Control: the mean mesh of the test set, for every picture, has a PA-MPVPE of {control:.1f} mm."
        )
    if task.attachment is not None and len(images) > 1:
        with attend_locally(task.attachment), precision.forward_context():
            attention = attention_over_batch(net, images)
        kinds = token_kinds(net, attention)
        sheet = draw_token_attention(attention, kinds, pictures, found, task.topology.upsampling, faces)
        explanation = (
            f"{attention.side.capitalize()} {attention.path!r}, mean over the heads, {len(pictures)} of {len(images)} "
            "pictures of one batch. At each token the pictures attend to each other; orange: the others look here more "
            "than by chance (uniform attention), blue: less."
        )
        made.append(("attention.jpg", sheet, "Batch attention over the tokens", explanation))
        rows = [[name, *attention_of(attention, tokens)] for name, tokens in kinds.items()]
        section["text"] = f"{section.get('text', '')}\n\n{_TABLE}"
        section["table"] = {"header": ["tokens", "number", "to itself", "to the picture looked at most"], "rows": rows}
    write_index(Path(trainer.default_root_dir) / FOLDER, made, keep=False)
    return {"sections": [section]}


_TABLE = (
    "How the tokens of a picture attend to those of the pictures of its batch, in multiples of uniform attention; mean "
    "over tokens and pictures."
)


def token_kinds(net: Any, attention: AttentionOverBatch) -> dict[str, slice]:
    """Which positions are joints, vertices of the coarse mesh, and cells of the picture."""
    ends = [0, net.joints, net.joints + net.coarse, attention.weights.shape[0]]
    names = ("joints", "vertices", "cells of the picture")
    return {name: slice(first, last) for name, first, last in zip(names, ends, ends[1:], strict=False)}


def attention_of(attention: AttentionOverBatch, tokens: slice) -> tuple[str, str, str]:
    """How many tokens there are, their attention to themselves, and to the sample that each attends to most."""
    weights = attention.weights[tokens] * attention.weights.shape[-1]
    own, most = weights.diagonal(dim1=1, dim2=2).mean().item(), weights.amax(-1).mean().item()
    return str(len(weights)), f"{own:.2f}x", f"{most:.2f}x"


def draw_hands(
    pictures: list[Image.Image],
    found: dict[str, Tensor],
    truth: Float[Tensor, "batch vertices 3"],
    camera: Float[Tensor, "batch 3"],
    errors: Float[Tensor, "batch vertices"],
    faces: Tensor,
) -> Image.Image:
    """Rows: pictures, predicted and true mesh over them and from the right, errors painted on the predicted one."""
    rows: dict[str, list[Image.Image]] = {name: [] for name in (
        "what the network is shown", "predicted, over the picture", "true, over the picture",
        "predicted, from the side", "true, from the side", "error on the surface",
    )}  # fmt: skip
    plain = torch.ones(3, _FINE, _FINE)
    for k, picture in enumerate(pictures):
        behind, predicted, true = _pixels(picture), (found["vertices"][k], found["camera"][k]), (truth[k], camera[k])
        painted = error_colours(errors[k])
        drawn = [
            behind, draw_mesh(behind, *predicted, faces), draw_mesh(behind, *true, faces),
            draw_mesh(plain, *predicted, faces, from_right=True), draw_mesh(plain, *true, faces, from_right=True),
            draw_mesh(plain, *predicted, faces, colours=painted),
        ]  # fmt: skip
        for tiles, pixels in zip(rows.values(), drawn, strict=True):
            tiles.append(_tile(pixels))
        rows["error on the surface"][-1] = captioned(rows["error on the surface"][-1], f"{errors[k].mean():.1f} mm")
    sheet = contact_sheet(list(rows.items()))
    tall = blank(max(sheet.width, 560), sheet.height + 60)
    tall.paste(sheet)
    levels = error_colours(torch.linspace(0, WORST, 400))
    bar = (levels * 255).byte().numpy()[None].repeat(16, 0)
    tall.paste(Image.fromarray(bar), (MARGIN, sheet.height))
    for share, anchor, words in (
        (0, "lm", "0 mm"),
        (0.5, "mm", f"{WORST / 2:.0f} mm"),
        (1, "rm", f"{WORST:.0f} mm or more"),
    ):
        text(tall, (MARGIN + 400 * share, sheet.height + 32), words, 20, MUTED, anchor)
    return tall


def error_colours(errors: Float[Tensor, " n"]) -> Float[Tensor, "n 3"]:
    """Blue at 0, pale in the middle, orange at `WORST` mm and above."""
    level = (errors / WORST).clamp(0, 1)[:, None]
    low, middle, high = (torch.tensor(colour) / 255 for colour in (LESS, _NEUTRAL, MORE))
    return torch.where(level < 0.5, low + (middle - low) * 2 * level, middle + (high - middle) * (2 * level - 1))


def draw_token_attention(
    attention: AttentionOverBatch,
    kinds: dict[str, slice],
    pictures: list[Image.Image],
    found: dict[str, Tensor],
    upsampling: np.ndarray,
    faces: Tensor,
) -> Image.Image:
    """Rows: attention of the other samples to vertices, on the mesh; to joints, as discs; to the picture's cells."""
    mass = attention.mass()[: len(pictures)]
    limit = limit_of(mass)
    joints, vertices, cells = (mass[:, tokens] for tokens in kinds.values())
    of_mesh = vertices.double() @ torch.as_tensor(upsampling).T
    side = round(cells.shape[1] ** 0.5)
    plain = torch.ones(3, _FINE, _FINE)
    on_mesh, on_joints, on_cells = [], [], []
    for k, picture in enumerate(pictures):
        mesh, camera = found["vertices"][k], found["camera"][k]
        colours = torch.tensor([tint(float(each), limit) for each in of_mesh[k]]) / 255
        on_mesh.append(_tile(draw_mesh(plain, mesh, camera, faces, colours=colours)))
        shown = as_image(_pixels(picture)).convert("L").convert("RGB")
        for place, each in zip(project(found["joints"][k : k + 1], camera[None])[0], joints[k], strict=True):
            x, y = ((place + 1) * _FINE / 2).tolist()
            circle = (x - 11, y - 11, x + 11, y + 11)
            ImageDraw.Draw(shown).ellipse(circle, fill=tint(float(each), limit), outline=(255, 255, 255), width=2)
        on_joints.append(tile(shown))
        on_cells.append(tile(heat_over(fit(picture), cells[k].view(side, side), limit)))
    sheet = contact_sheet([("to the tokens of vertices", on_mesh), ("to the tokens of joints", on_joints),
                           ("to the tokens of the picture", on_cells)])  # fmt: skip
    tall = blank(max(sheet.width, 560), sheet.height + 60)
    tall.paste(sheet)
    scale_bar(tall, MARGIN, sheet.height, 400, limit)
    return tall


def _first_samples(loader: Any, count: int) -> dict[str, Tensor]:
    """The first `count` samples, on the CPU: a rendered set draws what is read, so it is not read to its end."""
    kept: dict[str, Tensor] = {}
    for batch in map(as_batch, loader):
        rows = {name: value.cpu() for name, value in batch.items() if isinstance(value, Tensor)}
        kept = {name: torch.cat([kept[name], value]) if kept else value for name, value in rows.items()}
        if len(kept["images"]) >= count:
            break
    return {name: value[:count] for name, value in kept.items()}


def _pixels(picture: Image.Image) -> Float[Tensor, "3 size size"]:
    values = torch.from_numpy(np.asarray(picture, dtype=np.float32) / 255).permute(2, 0, 1)
    return F.interpolate(values[None], (_FINE, _FINE), mode="bilinear", antialias=True)[0].clamp(0, 1)


def _tile(pixels: Float[Tensor, "3 size size"]) -> Image.Image:
    return tile(as_image(pixels))
