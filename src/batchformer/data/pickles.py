"""Reading CIFAR's pickles without letting a damaged or foreign file run code."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from batchformer.errors import UserError

_ALLOWED = {
    "numpy.core.multiarray": {"_reconstruct"},
    "numpy._core.multiarray": {"_reconstruct"},
    "numpy": {"ndarray", "dtype"},
    "_codecs": {"encode"},
    "builtins": {"bytes"},
    "__builtin__": {"bytes"},
}


class _DataUnpickler(pickle.Unpickler):
    """Dictionaries, lists, strings, numbers and numpy arrays: what the official files hold, and nothing callable."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong in a file of images")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary in the file, keys as text; a UserError that names the file when it cannot be had."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}.") from error
    try:
        value = _DataUnpickler(io.BytesIO(content), encoding="latin1").load()
        if not isinstance(value, dict):
            raise pickle.UnpicklingError("it does not hold a dictionary")
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise UserError(
            f"{path} is damaged or not an official CIFAR file ({_reason(error)}): unpack or download it again."
        ) from error
    return value


def image_array(entry: dict[str, Any], key: str, path: Path) -> np.ndarray:
    """(n, 3, 32, 32) bytes: each row of the file is the red, then the green, then the blue plane."""
    data = entry.get(key)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        raise UserError(f"{path} is damaged: '{key}' is not an array of 32 x 32 images; unpack or download it again.")
    return data.reshape(-1, 3, 32, 32)


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__
