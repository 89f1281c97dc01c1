"""Predictions of meshes on a user's pictures: a picture with the mesh drawn over it, and the mesh as a file."""

import json
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from batchformer.data.drawing import refuse_other_picture, save_marked
from batchformer.data.images import output_names
from batchformer.data.rendering import rasterise, vertex_normals
from batchformer.errors import UserError
from batchformer.files import csv_text, refuse_to_replace, refuse_unwritable, write_atomically, write_text

_LIGHT = (0.3, -0.4, -0.85)
_MESH_COLOUR = (0.55, 0.70, 0.95)
_MARK = "batchformer predict"  # in the files of meshes, to recognise those of an earlier prediction
_COLUMNS = ("path", "mesh", "error")


def predict_meshes(task: Any, images: list[Path], data: Any, out: Path, line: Any, **options: str) -> str:
    """`NAME.png`, `NAME.obj` and `NAME.glb` in the folder `out` for each image, and `predictions.csv` for all."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: name a folder for the predictions with --out.")
    table, names = out / "predictions.csv", output_names(images)
    refuse_unwritable(table)
    refuse_to_replace(table, lambda content: content.startswith(",".join(_COLUMNS).encode()))
    for name in names:
        refuse_other_picture(out / f"{name}.png", "predict")
        for ending in ("obj", "glb"):
            refuse_to_replace(out / f"{name}.{ending}", lambda content: _MARK.encode() in content[:200])
    faces, rows = task.topology.faces, []
    for number, (path, name) in enumerate(zip(images, names, strict=True)):
        picture = task.read_image(path, "strict" in options)
        if picture is None:
            rows.append([str(path), "", task.unreadable[path]])
            continue
        line.update(number / len(images), path.name)
        pixels = data.predict_transform(picture).to(task.device)
        with torch.inference_mode():
            found = task.net(pixels[None])
        mean, std = (torch.tensor(v, device=pixels.device).view(3, 1, 1) for v in (data.mean, data.std))
        shown = (pixels * std + mean).clamp(0, 1)
        drawn = torch.cat(
            [draw_mesh(shown, found, faces), draw_mesh(torch.ones_like(shown), found, faces, side=True)], 2
        )
        save_marked(_as_image(drawn), out / f"{name}.png", "predict")
        vertices = found["vertices"][0].cpu().double().numpy()
        write_text(out / f"{name}.obj", obj_text(vertices, faces))
        write_atomically(out / f"{name}.glb", partial(_write, glb_bytes(vertices, faces)))
        rows.append([str(path), f"{name}.obj", ""])
    line.clear()
    done = sum(not error for *_, error in rows)
    if not done:
        raise UserError(next(iter(task.unreadable.values())))
    write_text(table, csv_text(_COLUMNS, rows))
    return f"{done} {'mesh' if done == 1 else 'meshes'} with pictures: {out}"


def _write(content: bytes, file: Any) -> None:
    file.write(content)


def draw_mesh(image: Tensor, found: dict[str, Tensor], faces: np.ndarray, side: bool = False) -> Tensor:
    """The mesh over the picture it was found in, by the camera found with it; `side`: seen from the right."""
    vertices = found["vertices"][:1].float()
    centred = vertices - vertices.mean(1, keepdim=True)
    scale, *shift = found["camera"][0].float()
    if side:
        points = torch.stack([-centred[..., 2], centred[..., 1], centred[..., 0]], dim=-1)
        plane = scale * points[..., :2]
    else:
        points = centred
        plane = scale * (vertices[..., :2] + torch.stack(shift))
    size = image.shape[-1]
    seen = torch.cat([(plane + 1) * size / 2, points[..., 2:]], dim=-1)
    chosen = torch.as_tensor(faces, device=image.device)
    face, inside = rasterise(seen, chosen, size)
    normals = vertex_normals(points, chosen)[0]
    normal = torch.nn.functional.normalize(
        (normals[chosen[face[0].clamp_min(0)]] * inside[0][..., None]).sum(-2), dim=-1
    )
    light = 0.35 + 0.65 * (normal @ torch.tensor(_LIGHT, device=image.device)).clamp_min(0)
    mesh = torch.tensor(_MESH_COLOUR, device=image.device).view(3, 1, 1) * light
    return torch.where(face[0] >= 0, mesh, image)


def _as_image(pixels: Tensor) -> Image.Image:
    return Image.fromarray((pixels * 255).round().byte().permute(1, 2, 0).cpu().numpy())


def obj_text(vertices: np.ndarray, faces: np.ndarray) -> str:
    """Wavefront OBJ, metres."""
    lines = [f"# {_MARK}", *(f"v {x:.6f} {y:.6f} {z:.6f}" for x, y, z in vertices)]
    return "\n".join([*lines, *(f"f {a + 1} {b + 1} {c + 1}" for a, b, c in faces)]) + "\n"


def glb_bytes(vertices: np.ndarray, faces: np.ndarray) -> bytes:
    """Binary glTF with one mesh, metres; y up and z towards the viewer, as glTF requires."""
    turned = (vertices * [1, -1, -1]).astype("<f4")
    index = faces.astype("<u4")
    binary = turned.tobytes() + index.tobytes()
    views = [{"buffer": 0, "byteOffset": 0, "byteLength": turned.nbytes},
             {"buffer": 0, "byteOffset": turned.nbytes, "byteLength": index.nbytes}]  # fmt: skip
    accessors = [
        {"bufferView": 0, "componentType": 5126, "count": len(turned), "type": "VEC3",
         "min": turned.min(0).tolist(), "max": turned.max(0).tolist()},
        {"bufferView": 1, "componentType": 5125, "count": index.size, "type": "SCALAR"},
    ]  # fmt: skip
    scene = {
        "asset": {"version": "2.0", "generator": _MARK}, "scene": 0, "scenes": [{"nodes": [0]}], "nodes": [{"mesh": 0}],
        "meshes": [{"primitives": [{"attributes": {"POSITION": 0}, "indices": 1}]}],
        "buffers": [{"byteLength": len(binary)}], "bufferViews": views, "accessors": accessors,
    }  # fmt: skip
    text = json.dumps(scene).encode()
    text += b" " * (-len(text) % 4)
    whole = 12 + 8 + len(text) + 8 + len(binary)
    head = struct.pack("<4sII", b"glTF", 2, whole) + struct.pack("<I4s", len(text), b"JSON")
    return head + text + struct.pack("<I4s", len(binary), b"BIN\0") + binary
