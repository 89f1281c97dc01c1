"""Pretrained weights on the Hugging Face Hub: whether they are in the local cache or can be fetched; needs no torch."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from urllib.parse import urlsplit
from urllib.request import getproxies

from batchformer.errors import UserError

PRETRAINED = "pretrained"  # in the place of a file: timm's weights for the backbone, which may be downloaded
SCRATCH = "scratch"  # in the place of a file: random weights
#: networks of this package, which have no weights to fetch
OWN_BACKBONES = (
    "resnet10", "resnet18_small_images", "resnet20", "resnet32", "resnet44", "resnet56", "resnet50_stride_in_1x1",
)  # fmt: skip
_PATIENCE = 3.0  # seconds for a connection


@contextmanager
def fetching() -> Iterator[None]:
    """Use the local Hugging Face cache only where the Hub is not reachable: its client would retry for a minute."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not _reachable(constants.ENDPOINT)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def refuse_unreachable(backbone: str, part: str = "") -> None:
    """Say how to get timm's weights where they are neither in the cache nor can be fetched, within a few seconds.

    Weights that are not under timm's own name on the Hub are left to timm, which looks for them later.
    """
    which = f"{part}=" if part else ""
    if backbone in OWN_BACKBONES:
        raise no_weights_of(backbone, which)
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    stored = [folder.name for folder in cache.glob("models--*")] if cache.is_dir() else []
    own = f"models--timm--{backbone}."
    if any(f"{name}.".startswith(own) or not name.startswith("models--timm--") for name in stored):
        return
    if not constants.HF_HUB_OFFLINE and _reachable(constants.ENDPOINT):
        return
    host = urlsplit(constants.ENDPOINT).hostname
    raise UserError(
        f"the pretrained weights of {backbone} are not in {cache}, and {host} cannot be "
        f"reached: fetch them where there is a network (python -c \"import timm; timm.create_model('{backbone}', "
        f'pretrained=True)") and copy that folder here; or give a file of weights, --init-from {which}FILE; or begin '
        f"with random weights, --init-from {SCRATCH}, which takes more images and epochs."
    )


def no_weights_of(backbone: str, which: str = "") -> UserError:
    """The error for a network that nobody published weights of; `which`: "PART=" in front of the file."""
    return UserError(
        f"there are no pretrained weights of {backbone} to fetch: choose a backbone of timm, give a file of weights, "
        f"--init-from {which}FILE, or begin with random weights, --init-from {SCRATCH}."
    )


def _reachable(address: str) -> bool:
    """Whether the host, or its proxy, accepts a connection within a few seconds."""
    proxies = getproxies()
    proxy = proxies.get(urlsplit(address).scheme) or proxies.get("all")
    place = urlsplit(address if proxy is None else proxy if "://" in proxy else f"http://{proxy}")
    connected = Event()

    def connect() -> None:
        with suppress(OSError):
            port = place.port or (443 if place.scheme == "https" else 80)
            socket.create_connection((place.hostname or "", port), timeout=_PATIENCE).close()
            connected.set()

    attempt = Thread(target=connect, daemon=True)  # a DNS lookup has no timeout
    attempt.start()
    attempt.join(_PATIENCE)
    return connected.is_set()
