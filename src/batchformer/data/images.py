"""Opening one image file, or saying which one cannot be opened."""

from collections.abc import Callable
from pathlib import Path

from PIL import Image

from batchformer.errors import UserError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".gif")


def is_image(path: Path) -> bool:
    return path.suffix.lower() in EXTENSIONS


def open_image(path: str | Path) -> Image.Image:
    """The whole image in RGB, decoded now: a cut-off file is found here and not in the middle of a transform."""
    return _read(path, lambda image: image.convert("RGB"))


def check_image(path: str | Path) -> None:
    """That there is an image, by the first bytes of the file; nothing is decoded."""
    _read(path, lambda image: image)


def _read(path: str | Path, get: Callable[[Image.Image], Image.Image]) -> Image.Image:
    try:
        with Image.open(path) as image:
            return get(image)
    except FileNotFoundError as error:
        raise UserError(f"image {path} does not exist: put it back, or check data.root and its list.") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"image {path} cannot be read ({reason}): repair it or take it out of the data set.") from error
