"""Random numbers as functions of names: the same (seed, epoch, purpose) gives the same numbers on every machine.

Nothing here has a state that could be lost when a run is killed: order, augmentation and splits are computed from
integers the run already knows, so a resumed run draws what the uninterrupted one would have drawn.
"""

import hashlib

import numpy as np


def derived_key(*parts: int | str) -> int:
    """128 bits that depend on every part and on their order; equal on every machine and Python version."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=16).digest(), "little")


def generator(*parts: int | str) -> np.random.Generator:
    """A counter-based generator keyed by the parts."""
    return np.random.Generator(np.random.Philox(key=derived_key(*parts)))


def sample_seed(seed: int, epoch: int, index: int, repeat: int = 0) -> int:
    """A seed for the global generators while one sample is augmented on the host, for the `repeat`-th time."""
    return derived_key(seed, epoch, index, "augment", *([repeat] if repeat else [])) & (2**63 - 1)
