"""Keep the libraries' banners, tips and warnings out of the terminal."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Context manager: errors are still raised, warnings of this package are one line each; ``--debug`` shows
    everything.

    Logging is switched off as a whole because Lightning sets the level of its own logger when it is imported.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    before, as_python_does = logging.root.manager.disable, warnings.formatwarning
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", category=UserWarning, module=r"batchformer(\.|$)")
        # without the line of code that raised it
        warnings.formatwarning = lambda message, *_, **__: f"batchformer: warning: {' '.join(str(message).split())}\n"
        try:
            yield
        finally:
            warnings.formatwarning = as_python_does
            logging.disable(before)
