"""Many small image files into one array of bytes."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from batchformer.data.images import open_image
from batchformer.errors import UserError

_AT_ONCE = 256
_PATIENCE = 2.0  # seconds before a progress bar is shown


def decode_images(
    paths: Sequence[Path], size: int, title: str, show_progress: bool = True
) -> UInt8[np.ndarray, "n 3 {size} {size}"]:
    """All images in RGB (grey ones too), read by several threads: PIL decodes without holding Python's lock.

    The bar appears on a terminal, when it takes longer than two seconds. An image of another size is refused by name.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    images = np.empty((len(paths), 3, size, size), np.uint8)

    def read(first: int) -> int:
        part = paths[first : first + _AT_ONCE]
        for place, path in enumerate(part, first):
            image = open_image(path)
            if image.size != (size, size):
                width, height = image.size
                raise UserError(
                    f"image {path} is {width} x {height} pixels, not {size} x {size} as in the official data set: "
                    f"unpack it again."
                )
            images[place] = np.asarray(image).transpose(2, 0, 1)
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
