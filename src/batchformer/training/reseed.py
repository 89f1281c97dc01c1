"""Random numbers of a training step as a function of (seed, step): a resumed run draws what an unbroken one draws."""

import hashlib

import torch


def seed_from(*numbers: int) -> int:
    """63 bits of a hash of the numbers: neighbouring steps get unrelated seeds, which a sum would not give."""
    digest = hashlib.blake2b(":".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def reseed(*numbers: int) -> None:
    """Seed torch's generators, those of CUDA too, from the numbers.

    A CUDA graph reads the generator when it is replayed, so this also decides the dropout of the next replay. No
    host synchronisation. Only devices in use are seeded: for others `torch.manual_seed` queues a call with a stack
    trace, which takes longer than many steps.
    """
    seed = seed_from(*numbers)
    torch.default_generator.manual_seed(seed)
    for device in (torch.cuda, torch.xpu):
        if device.is_initialized():
            device.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
