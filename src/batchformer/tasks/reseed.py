"""Random numbers of a training step as a function of (seed, step): a resumed run draws what an unbroken one draws."""

from __future__ import annotations

import hashlib

import torch


def reseed(*numbers: int) -> None:
    """Seed torch's generators, those of CUDA too, from a hash of the numbers.

    Neighbouring steps get unrelated seeds, which a sum of seed and step would not give. A CUDA graph reads the
    generator when it is replayed, so this also decides the dropout of the next replay. Nothing waits for the device.
    """
    digest = hashlib.blake2b(":".join(map(str, numbers)).encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)
