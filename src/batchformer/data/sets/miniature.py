"""Generated pictures and scenes for the miniatures of data sets, deterministic to the byte.

A data set's own file writes its miniature, in its official layout (`batchformer.data.sets.write_miniature`). Pictures
are stripes whose colour and direction belong to the class, under noise: enough to learn something. Scenes, for
detectors, are rectangles of such stripes. Among their images are one without any object, one with a crowd, one in grey,
and upright ones.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from batchformer.data.loading.order import generator

FILE_COUNTS = (160, 80, 40, 20, 10, 5, 3, 2)  # training images of the classes, where they have a long tail
BALANCED = 32  # and of each, where they have none
TEST_PER_CLASS = 3
THINGS = {1: "person", 3: "car", 17: "cat", 44: "bottle", 90: "toothbrush"}  # COCO's ids, with their gaps
TRAIN_SCENES, VAL_SCENES = range(24), range(1000, 1008)
EMPTY, CROWDED, GREY = 2, 3, 4  # images without any object, with a crowd, without colour


def picture(label: int, number: int, height: int, width: int) -> np.ndarray:
    """A generated image, (height, width, 3) bytes that depend on the arguments only."""
    colour = generator(label, "colour").integers(40, 216, 3)
    noise = generator(label, number, "noise").integers(-30, 31, (height, width, 3))
    y, x = np.mgrid[:height, :width]
    stripes = np.sin((x * (label % 5) + y * (label % 3 + 1) + 3 * number) * 0.5)[..., None] * 40
    return np.clip(colour + stripes + noise, 0, 255).astype(np.uint8)


def save_picture(path: Path, label: int, number: int, height: int = 40, width: int = 48, grey: bool = False) -> None:
    _save_jpeg(path, picture(label, number, height, width), 85, grey)


def write_mat(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """A MATLAB file without the time it was written at, which scipy puts into its first 116 bytes."""
    from scipy.io import savemat

    savemat(path, arrays)
    path.write_bytes(b"MATLAB 5.0 MAT-file".ljust(116) + path.read_bytes()[116:])


class GeneratedScene(NamedTuple):
    pixels: np.ndarray
    objects: list[tuple[int, tuple[int, int, int, int]]]  # position in THINGS, (x, y, width, height)
    segments: np.ndarray  # 0 void, 1 and 2 stuff, then the objects
    crowded: bool  # the first object is a crowd


def draw_scene(number: int) -> GeneratedScene:
    """One to four rectangles of stripes on a grey ground, none in the image number EMPTY; some images are upright."""
    draw = generator(number, "scene")
    height, width = (64, 96) if number % 3 else (96, 72)
    pixels = np.clip(128 + draw.integers(-20, 21, (height, width, 3)), 0, 255).astype(np.uint8)
    segments = np.zeros((height, width), dtype=np.int64)
    segments[: height // 2 - 4], segments[height // 2 :] = 1, 2
    objects = []
    for position in range(0 if number % 1000 == EMPTY else int(draw.integers(1, 5))):
        label = int(draw.integers(len(THINGS)))
        h, w = (int(draw.integers(12, side // 2)) for side in (height, width))
        y, x = int(draw.integers(height - h)), int(draw.integers(width - w))
        pixels[y : y + h, x : x + w] = picture(label, number, h, w)
        segments[y : y + h, x : x + w] = 3 + position
        objects.append((label, (x, y, w, h)))
    return GeneratedScene(pixels, objects, segments, number % 1000 == CROWDED)


def save_scene(path: Path, number: int) -> GeneratedScene:
    scene = draw_scene(number)
    _save_jpeg(path, scene.pixels, 90, grey=number == GREY)
    return scene


def _save_jpeg(path: Path, pixels: np.ndarray, quality: int, grey: bool) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).convert("L" if grey else "RGB").save(path, format="JPEG", quality=quality)
