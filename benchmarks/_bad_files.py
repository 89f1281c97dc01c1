"""Files as they should not be: damaged images of many kinds, and files that would run code if they were unpickled."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image


def _picture(kind: str, **keywords: Any) -> bytes:
    """A whole image with some structure, 40 x 32."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 255, (4, 5, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
    mode = keywords.pop("mode", "RGB")
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, kind, **keywords)
    return file.getvalue()


def _fuzzed(content: bytes, seed: int, begin: int, end: int, count: int) -> bytes:
    """Random bytes at `count` places between `begin` and `end`."""
    draw = random.Random(seed)
    changed = bytearray(content)
    for _ in range(count):
        changed[draw.randrange(begin, min(end, len(changed)))] = draw.randrange(256)
    return bytes(changed)


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def _png(width: int, height: int, data: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def damaged_images() -> dict[str, tuple[str, bytes]]:
    """Name of a kind of damage: the ending of the file, and its content."""
    jpeg, png, gif, tiff = _picture("JPEG"), _picture("PNG"), _picture("GIF"), _picture("TIFF")
    webp, bmp = _picture("WEBP"), _picture("BMP")
    formats = {"jpg": jpeg, "png": png, "gif": gif, "tif": tiff, "webp": webp, "bmp": bmp}
    kinds: dict[str, tuple[str, bytes]] = {}
    for ending, content in formats.items():
        kinds[f"{ending} cut in half"] = (ending, content[: len(content) // 2])
        kinds[f"{ending} of its first twelve bytes"] = (ending, content[:12])
        kinds[f"{ending} with a fuzzed header"] = (ending, _fuzzed(content, len(kinds), 4, 60, 6))
        kinds[f"{ending} with a fuzzed body"] = (ending, _fuzzed(content, len(kinds), 60, 10**9, 40))
    kinds["png of 200,000 x 200,000 pixels"] = ("png", _png(200_000, 200_000, zlib.compress(bytes(1000))))
    kinds["png whose text expands to 200 MB"] = (
        "png",
        png[:33] + _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(200_000_000), 9)) + png[33:],
    )
    kinds["png with a wrong checksum"] = ("png", png[:29] + b"\0\0\0\0" + png[33:])
    kinds["png of no pixels"] = ("png", _png(0, 0, zlib.compress(b"")))
    kinds["png without data"] = ("png", _png(40, 32, b""))
    kinds["png whose data is no zlib stream"] = ("png", _png(40, 32, b"nothing of the kind"))
    kinds["jpg with EXIF of random bytes"] = (
        "jpg",
        _picture("JPEG", exif=b"Exif\0\0" + random.Random(1).randbytes(80)),
    )
    kinds["jpg with a profile of random bytes"] = ("jpg", _picture("JPEG", icc_profile=random.Random(2).randbytes(300)))
    kinds["jpg in CMYK, cut in half"] = ("jpg", _picture("JPEG", mode="CMYK")[:700])
    kinds["empty file"] = ("jpg", b"")
    kinds["text"] = ("jpg", b"this is no image\n")
    kinds["page of an error"] = ("png", b"<!doctype html><title>404 Not Found</title>")
    kinds["zeros"] = ("jpg", bytes(5000))
    kinds["random bytes"] = ("webp", random.Random(3).randbytes(5000))
    return kinds


class _Command:
    """When it is unpickled, a file is made."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch '{self.mark}'",)


def hostile_checkpoint(path: Path, mark: Path) -> None:
    torch.save({"state_dict": {"weight": _Command(mark)}, "epoch": 1}, path)


def hostile_pickle(path: Path, mark: Path) -> None:
    path.write_bytes(pickle.dumps(_Command(mark)))


def hostile_npz(path: Path, mark: Path, names: tuple[str, ...]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            content = io.BytesIO()
            np.lib.format.write_array(content, np.array([_Command(mark)], dtype=object), allow_pickle=True)
            archive.writestr(f"{name}.npy", content.getvalue())


def hostile_glb(path: Path) -> None:
    """Its buffer is a file elsewhere on the machine."""
    text = json.dumps(
        {"asset": {"version": "2.0"}, "buffers": [{"uri": "file:///etc/passwd", "byteLength": 64}], "meshes": []}
    ).encode()
    text += b" " * (-len(text) % 4)
    path.write_bytes(struct.pack("<4sII", b"glTF", 2, 20 + len(text)) + struct.pack("<I4s", len(text), b"JSON") + text)
