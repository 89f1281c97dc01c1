"""Opening one image file, or saying which one cannot be opened."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from PIL import Image, ImageOps

from batchformer.errors import UserError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".gif")


def is_image(path: Path) -> bool:
    return path.suffix.lower() in EXTENSIONS


def open_image(path: str | Path, upright: bool = False) -> Image.Image:
    """The whole image in RGB, decoded now: a cut-off file is found here and not in the middle of a transform.

    `upright`: as viewers show it. A phone stores what its sensor saw and notes beside it (EXIF) how to turn that. Else
    the pixels as they are stored, which the annotations of data sets refer to.
    """
    return _read(path, lambda image: (_turned(image) if upright else image).convert("RGB"))


def check_image(path: str | Path) -> None:
    """That there is an image, by the first bytes of the file; nothing is decoded."""
    _read(path, lambda image: image)


def _turned(image: Image.Image) -> Image.Image:
    image.load()  # what is wrong with the image itself is told; a note that makes no sense spoils no image
    with suppress(Exception):
        ImageOps.exif_transpose(image, in_place=True)
    return image


def _read(path: str | Path, get: Callable[[Image.Image], Image.Image]) -> Image.Image:
    try:
        with Image.open(path) as image:
            return get(image)
    except FileNotFoundError as error:
        raise UserError(f"image {path} does not exist: put it back, or check data.root and its list.") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"image {path} cannot be read ({reason}): repair it or take it out of the data set.") from error
