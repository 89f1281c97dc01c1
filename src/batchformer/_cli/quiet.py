"""Keep the libraries' banners, tips and warnings out of the terminal, so that a person reads only what matters."""

from __future__ import annotations

import logging
import os
import warnings


def silence_libraries() -> None:
    """Errors still come through as exceptions; ``--debug`` leaves everything as it is."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("torch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    warnings.filterwarnings("default", module=r"batchformer(\.|$)")
