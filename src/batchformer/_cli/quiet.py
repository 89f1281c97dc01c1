"""Keep the libraries' banners, tips and warnings out of the terminal, so that a person reads only what matters."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Errors still come through as exceptions, and so do the warnings of this package; ``--debug`` shows everything.

    Logging is switched off as a whole because Lightning sets the level of its own logger when it is imported.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", category=UserWarning, module=r"batchformer(\.|$)")
        try:
            yield
        finally:
            logging.disable(before)
