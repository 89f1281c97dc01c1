"""Predictions of meshes on a user's pictures: drawn over the picture, as files, and as FreiHAND's server takes them."""

import json
import struct
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from batchformer.data.drawing import as_image, refuse_other_picture, save_marked
from batchformer.data.images import output_names
from batchformer.data.rendering import draw_mesh
from batchformer.errors import UserError
from batchformer.files import csv_text, refuse_to_replace, refuse_unwritable, write_atomically, write_text

SERVER_FILE, _INSIDE = "pred.zip", "pred.json"
_MARK = "batchformer predict"  # in the files of meshes, to recognise those of an earlier prediction
_COLUMNS = ("path", "mesh", "error")


def predict_meshes(task: Any, images: list[Path], data: Any, out: Path, line: Any, **options: str) -> str:
    """In the folder `out`: NAME.png, .obj and .glb for each image; predictions.csv and pred.zip for all of them."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: name a folder for the predictions with --out.")
    table, names = out / "predictions.csv", output_names(images)
    refuse_unwritable(table)
    refuse_to_replace(table, lambda content: content.startswith(",".join(_COLUMNS).encode()))
    refuse_to_replace(out / SERVER_FILE, lambda content: _INSIDE.encode() in content[:64])
    for name in names:
        refuse_other_picture(out / f"{name}.png", "predict")
        for ending in ("obj", "glb"):
            refuse_to_replace(out / f"{name}.{ending}", lambda content: _MARK.encode() in content[:200])
    faces, rows, joints, meshes = task.topology.faces, [], [], []
    triangles = torch.as_tensor(faces, device=task.device)
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
        mesh = found["vertices"][0].float(), found["camera"][0].float(), triangles
        drawn = torch.cat([draw_mesh(shown, *mesh), draw_mesh(torch.ones_like(shown), *mesh, from_right=True)], 2)
        save_marked(as_image(drawn), out / f"{name}.png", "predict")
        vertices = found["vertices"][0].cpu().double().numpy()
        write_text(out / f"{name}.obj", obj_text(vertices, faces))
        write_atomically(out / f"{name}.glb", partial(_write, glb_bytes(vertices, faces)))
        rows.append([str(path), f"{name}.obj", ""])
        joints.append(found["mesh_joints"][0].cpu().double().numpy())
        meshes.append(vertices)
    line.clear()
    if not meshes:
        raise UserError(next(iter(task.unreadable.values())))
    write_text(table, csv_text(_COLUMNS, rows))
    message = f"{len(meshes)} {'mesh' if len(meshes) == 1 else 'meshes'} with pictures"
    if len(meshes) < len(images):  # the server knows a hand by its number
        (out / SERVER_FILE).unlink(missing_ok=True)
        return f"{message}, without {SERVER_FILE}, which needs all images: {out}"
    write_atomically(out / SERVER_FILE, partial(write_for_server, joints, meshes))
    return f"{message}, and {SERVER_FILE} for FreiHAND's server: {out}"


def write_for_server(joints: list[np.ndarray], meshes: list[np.ndarray], file: Any) -> None:
    """A zip archive with pred.json, as FreiHAND's server takes it: [joints of all hands, vertices of all hands].

    Metres, 21 joints in FreiHAND's order, those of the mesh; hands in the order of the pictures' numbers.
    """
    content = json.dumps([[np.round(hand, 6).tolist() for hand in hands] for hands in (joints, meshes)])
    with zipfile.ZipFile(file, "w") as archive:
        entry = zipfile.ZipInfo(_INSIDE)  # without the time of day: the same bytes for the same predictions
        entry.compress_type = zipfile.ZIP_DEFLATED
        archive.writestr(entry, content)


def _write(content: bytes, file: Any) -> None:
    file.write(content)


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
