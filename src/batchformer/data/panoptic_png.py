"""Panoptic segmentations as COCO stores them: a colour image whose pixels are the ids of segments."""

from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8
from PIL import Image

from batchformer.data.images import open_image


def ids_of_colours(colours: UInt8[np.ndarray, "height width 3"]) -> Int[np.ndarray, "height width"]:
    """red + 256 green + 65536 blue."""
    parts = colours.astype(np.int32)
    return parts[..., 0] + (parts[..., 1] << 8) + (parts[..., 2] << 16)


def colours_of_ids(ids: Int[np.ndarray, "height width"]) -> UInt8[np.ndarray, "height width 3"]:
    return np.stack([ids & 255, ids >> 8 & 255, ids >> 16 & 255], axis=-1).astype(np.uint8)


def read_segment_ids(path: str | Path) -> Int[np.ndarray, "height width"]:
    return ids_of_colours(np.asarray(open_image(path)))


def write_segment_ids(path: str | Path, ids: Int[np.ndarray, "height width"]) -> None:
    Image.fromarray(colours_of_ids(np.asarray(ids, dtype=np.int64))).save(path, format="PNG")
