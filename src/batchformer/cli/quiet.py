"""Keep the libraries' banners, tips and warnings out of the terminal, so that a person reads only what matters."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Errors still come through as exceptions, and the warnings of this package as one line each; ``--debug`` shows
    everything.

    Logging is switched off as a whole because Lightning sets the level of its own logger when it is imported.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    before, as_python_does = logging.root.manager.disable, warnings.formatwarning
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", category=UserWarning, module=r"batchformer(\.|$)")
        warnings.formatwarning = _one_line
        try:
            yield
        finally:
            warnings.formatwarning = as_python_does
            logging.disable(before)


def _one_line(message: Warning | str, *_: Any, **__: Any) -> str:
    """Without the line of code it comes from, which is ours and tells a user nothing."""
    return f"batchformer: warning: {' '.join(str(message).split())}\n"
