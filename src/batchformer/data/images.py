"""Find image files in folders; open one, with an error that names the file; decode many small ones to one array."""

import hashlib
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps, features

from batchformer.errors import UserError, reason_of

_AT_ONCE = 256
_ORIENTATION = 0x0112  # the tag in EXIF
_SAMPLED = 64  # rows and columns of an image whose pixels are compared first
_PATIENCE = 2.0  # seconds before a progress bar is shown
_ALWAYS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".gif", ".jfif")
_READ_WITH = {".heic": "pillow-heif", ".heif": "pillow-heif", ".avif": "--upgrade pillow"}


def _readable_endings() -> tuple[str, ...]:
    """File extensions that Pillow reads here; HEIC, written by phones, needs the plug-in pillow-heif."""
    more = [".avif"] if "avif" in features.modules and features.check("avif") else []
    with suppress(ImportError):
        import pillow_heif  # type: ignore[import-not-found]

        pillow_heif.register_heif_opener()
        more += [".heic", ".heif"]
    return (*_ALWAYS, *more)


EXTENSIONS = _readable_endings()


def images_in(folder: str | Path, others: Counter[str] | None = None, passed: list[str] | None = None) -> list[str]:
    """Paths of the images in a folder and in the folders inside it, in alphabetical order.

    Links are followed, as torchvision's ImageFolder does. Hidden files are skipped: they are written by programs
    (macOS' ._photo.jpg, Jupyter's .ipynb_checkpoints). `others` counts the other files by their extensions, and
    `passed` lists them.
    """
    found = []
    for current, names in _visible_folders(folder):
        visible = [name for name in names if not name.startswith(".")]
        images = [name for name in visible if name.lower().endswith(EXTENSIONS)]  # a Path for each takes seconds
        found += [os.path.join(current, name) for name in images]
        if others is not None and len(images) < len(visible):
            left = sorted(set(visible).difference(images))
            others.update(os.path.splitext(name)[1].lower() for name in left)
            if passed is not None:
                passed += [os.path.join(current, name) for name in left]
    return sorted(found)


def passed_over(others: Counter[str]) -> str:
    """`3 files skipped: 2 .txt, 1 .heic`, with what would read some of them."""
    count = others.total()
    often = sorted(others.items(), key=lambda found: (-found[1], found[0]))
    listed = [f"{number} {ending or 'without an ending'}" for ending, number in often]
    more = f" and {len(listed) - 5} other endings" if len(listed) > 5 else ""
    hint = next((f" (to read {ending}: pip install {it})" for ending, it in _READ_WITH.items() if ending in others), "")
    return f"{count} {'file' if count == 1 else 'files'} skipped: {', '.join(listed[:5])}{more}{hint}"


def _visible_folders(folder: str | Path) -> Iterator[tuple[str, list[str]]]:
    above: dict[str, frozenset[str]] = {}  # for each folder the real paths of its parents
    for current, inside, files in os.walk(folder, followlinks=True):
        around = above.get(current, frozenset()) | {os.path.realpath(current)}
        # a link to a parent folder would be an endless loop
        inside[:] = [
            name
            for name in inside
            if not name.startswith(".") and os.path.realpath(os.path.join(current, name)) not in around
        ]
        above.update({os.path.join(current, name): around for name in inside})
        yield current, files


def output_names(images: Sequence[Path]) -> list[str]:
    """The names of the images without their endings, made different where several are the same."""
    names: dict[str, None] = {}  # a dict: ordered, with fast lookup for thousands of images
    stems = [path.stem for path in images]
    taken, last = set(stems), dict.fromkeys(stems, 1)
    for stem in stems:
        name, number = stem, last[stem]  # the numbers before are taken: not to be tried again
        while name in names or (number > 1 and name in taken):
            number += 1
            name = f"{stem}-{number}"
        names[name], last[stem] = None, number
    return list(names)


def open_image(path: str | Path, upright: bool = False) -> Image.Image:
    """The whole image in RGB, decoded now: a cut-off file is found here and not in the middle of a transform.

    `upright`: rotated by the EXIF orientation, as viewers show it. Else the pixels as they are stored, which the
    annotations of data sets refer to.
    """
    return _read(path, lambda image: _in_colour(_turned(image) if upright else image))


def check_image(path: str | Path) -> None:
    """Check that the file is an image, by its first bytes; nothing is decoded."""
    _read(path, lambda image: image)


class ImageFacts(NamedTuple):
    """What `inspect_image` finds. Images with the same pixels have the same `content`; others rarely do."""

    width: int
    height: int
    mode: str
    turned: bool  # its EXIF orientation says that viewers rotate it
    content: tuple[int | str, ...]  # size, mode, and checksums of some of the pixels and of the palette


def pixel_digest(path: str | Path) -> str:
    """sha256 of mode, size, palette and all pixels as stored: equal where two files show the same picture."""
    with Image.open(path) as image:
        image.load()
        palette = b"" if image.palette is None else image.palette.tobytes()
        return hashlib.sha256(f"{image.mode} {image.size} ".encode() + palette + image.tobytes()).hexdigest()


def inspect_image(path: str | Path) -> ImageFacts:
    """Read a file once and decode it as training will; a damaged one is a UserError that names it."""
    facts: list[ImageFacts] = []

    def look(image: Image.Image) -> Image.Image:
        image.load()
        if image.mode in ("I", "F") or image.mode.startswith("I;16"):
            _in_colour(image)  # which refuses some of them
        some = image
        if max(image.size) > _SAMPLED:  # a checksum of all pixels would take a third of the time
            sides = (min(image.width, _SAMPLED), min(image.height, _SAMPLED))
            some = image.resize(sides, Image.Resampling.NEAREST)
        palette = zlib.crc32(image.palette.tobytes()) if image.palette is not None else 0
        content = (*image.size, zlib.crc32(some.tobytes()), palette, image.mode)
        turned = "exif" in image.info and image.getexif().get(_ORIENTATION, 1) not in (0, 1)
        facts.append(ImageFacts(*image.size, image.mode, turned, content))
        return image

    _read(path, look)
    return facts[0]


def _in_colour(image: Image.Image) -> Image.Image:
    """Convert to 8-bit RGB. Pillow clips grey values of more bits at 255: such an image would be nearly all white.

    Where no value is above 255 they are read as 8-bit values in a wider type, and floats up to 1 as fractions of white.
    """
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        grey = np.asarray(image).astype(np.float32)
        if not np.isfinite(grey).all() or grey.min(initial=0.0) < 0:
            raise ValueError("some of its grey values are negative or no numbers; save it with 8 or 16 bits")
        if image.mode == "F" and 0 < grey.max(initial=0.0) <= 1:
            grey *= 255
        if grey.max(initial=0.0) > 255:
            if image.mode in ("I", "F") and image.format not in ("PNG", "PPM"):  # these two are of 16 bits at most
                raise ValueError(
                    "its grey values are above 255 and nothing says which is white; save it with 8 or 16 bits"
                )
            grey /= 257
        return Image.fromarray(grey.round().clip(0, 255).astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def _turned(image: Image.Image) -> Image.Image:
    image.load()  # a damaged image raises here; damaged EXIF data is ignored
    with suppress(Exception):
        ImageOps.exif_transpose(image, in_place=True)
    return image


def _read(path: str | Path, get: Callable[[Image.Image], Image.Image]) -> Image.Image:
    try:
        with Image.open(path) as image:
            return get(image)
    except FileNotFoundError as error:
        raise UserError(f"image {path} does not exist: put it back, or check data.root and its list.") from error
    except Exception as error:  # of damaged files Pillow's readers raise whatever they come across
        raise UserError(
            f"image {path} cannot be read ({reason_of(error)}): repair it or take it out of the data set."
        ) from error


def decode_images(
    paths: Sequence[str | Path],
    size: int,
    title: str,
    show_progress: bool = True,
    resized: bool = False,
    upright: bool = False,
) -> UInt8[np.ndarray, "n 3 {size} {size}"]:
    """All images in RGB (grey ones too), read by several threads: PIL releases the GIL while decoding.

    The progress bar appears on a terminal, when it takes longer than two seconds. An image of another size is refused
    by name, or (`resized`) resized to that one, bilinear, without keeping its aspect ratio.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    images = np.empty((len(paths), 3, size, size), np.uint8)

    def read(first: int) -> int:
        part = paths[first : first + _AT_ONCE]
        for position, path in enumerate(part, first):
            image = open_image(path, upright)
            if resized:
                image = image.resize((size, size), Image.Resampling.BILINEAR)
            if image.size != (size, size):
                width, height = image.size
                raise UserError(
                    f"image {path} is {width} x {height} pixels, not {size} x {size} as in the official data set: "
                    f"unpack it again."
                )
            images[position] = np.asarray(image).transpose(2, 0, 1)
        return len(part)

    # disable=None: no bar where stderr is a file
    bar = tqdm(total=len(paths), desc=title, unit="image", delay=_PATIENCE, disable=None if show_progress else True)
    with bar, ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        parts = pool.map(read, range(0, len(paths), _AT_ONCE))
        try:
            for count in parts:
                bar.update(count)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # do not read on after an error or an interrupt
            raise
    return images
