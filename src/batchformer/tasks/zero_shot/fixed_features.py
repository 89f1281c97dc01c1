"""Features of a backbone that is not trained: computed once for all images, and kept for the runs that follow."""

import hashlib
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from batchformer.data.loading.epoch_loader import as_batch
from batchformer.errors import UserError

_PATIENCE = 2.0  # seconds before a progress bar is shown
_latest: tuple[str, dict[str, Tensor]] = "", {}  # of this process: the runs of a comparison share a backbone


@torch.no_grad()
def fixed_features(backbone: nn.Module, data: Any, device: torch.device) -> dict[str, Float[Tensor, "images dim"]]:
    """The backbone's features of the images of "train" and of every evaluation set, as they are evaluated."""
    global _latest
    names = ("train", *data.evaluation_sets)
    key = _key(backbone, data, device)
    if _latest[0] != key:
        _latest = "", {}  # first free the memory
        _latest = key, {name: _features_of(backbone, data, name, device) for name in names}
    return _latest[1]


def _features_of(backbone: nn.Module, data: Any, name: str, device: torch.device) -> Tensor:
    from tqdm import tqdm  # type: ignore[import-untyped]

    loader, found = data.evaluation_loader(name), list[Tensor]()
    backbone.eval()
    for batch in tqdm(loader, f"features of {name}", unit="batch", delay=_PATIENCE, disable=None):
        with torch.autocast(device.type, enabled=False):
            features = backbone(as_batch(batch)["images"].to(device)).float()
        bad = (~features.isfinite().all(1)).nonzero()[:, 0].tolist()
        if bad:
            number = sum(map(len, found)) + bad[0]
            raise UserError(
                f"the features of image {number} of the set {name} are not finite: check the weights of the backbone "
                f"(--init-from) and the image."
            )
        found.append(features)
    return torch.cat(found)


def _key(backbone: nn.Module, data: Any, device: torch.device) -> str:
    """Equal for the same network, weights, images and transforms."""
    digest = hashlib.sha256(f"{backbone}{device}{type(data)}{data.root}".encode(errors="surrogateescape"))
    for name, tensor in backbone.state_dict().items():
        digest.update(name.encode() + tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    for name in ("fingerprint", "test_images", "image_size", "mean", "std", "augment", "eval_batch_size"):
        digest.update(f"{name}={getattr(data, name, None)}".encode())
    return digest.hexdigest()
