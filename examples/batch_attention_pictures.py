"""Look at attention over the batch: for your own images and any timm model, or for digits without any argument.

    python examples/batch_attention_pictures.py                          trains on digits first, some seconds
    python examples/batch_attention_pictures.py PHOTOS --model vit_tiny_patch16_224 --weights trained.pt
    python examples/batch_attention_pictures.py PHOTOS --run RUN         of a classifier that `batchformer fit` trained

PHOTOS is a folder of images, with or without a subfolder per class. `--weights` takes a state dict (.pt, .safetensors)
or a Lightning checkpoint of the model, with the module's weights where it was trained attached; without it both are
random, and the pictures show what an untrained module does. Those of a run go to its folder `pictures`, where
`batchformer report` finds them. docs/pictures.md says how to read them.
Needs timm, scikit-learn and Pillow (the extra `train` of this package); a few seconds on a CPU.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import batchformer as bf
from batchformer.analysis.pictures import write_pictures
from batchformer.data.images import images_in, open_image
from batchformer.errors import UserError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="of images; left out: handwritten digits")
    parser.add_argument("--run", type=Path, help="folder of a run, instead of --model, --weights, --after and --heads")
    parser.add_argument("--model", help="name of a timm model (vit_tiny_patch16_224)")
    parser.add_argument("--weights", type=Path, help="file with trained weights; left out: random ones")
    parser.add_argument("--after", help="submodule the module stands after, as blocks.8; left out: two thirds deep")
    parser.add_argument("--heads", type=int, help="of the module; left out: as many as the block has, or 4")
    parser.add_argument("--images", type=int, default=16, help="how many images make the batch (16)")
    parser.add_argument("--out", type=Path, help="folder to write to (pictures)")
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.folder is None:
        if given.run:
            raise UserError("--run needs a folder of images to look at: name it first.")
        net, images, labels = digits_with_a_trained_module()
        options: dict[str, Any] = {}
    else:
        paths = spread(find_images(given.folder), given.images)
        net, transform, options = trained_run(given) if given.run else timm_model(given)
        images = torch.stack([transform(open_image(path, upright=True)) for path in paths])
        classes = sorted({path.parent for path in paths})
        labels = [classes.index(path.parent) for path in paths]
    net.eval()
    out = given.out or (given.run or Path()) / "pictures"
    for path in write_pictures(out, net, images, labels=labels, **options):
        print(path)


def trained_run(given: argparse.Namespace) -> tuple[nn.Module, Any, dict[str, Any]]:
    """The network of a run, its transform for test images, and by what that normalises."""
    from batchformer.cli.finished_run import load_run

    if unused := [name for name in ("model", "weights", "after", "heads") if getattr(given, name) is not None]:
        raise UserError(f"--run brings its own model: leave out --{unused[0]}.")
    found = load_run(str(given.run))
    if found.config.get("task") in ("detection", "panoptic"):
        raise UserError(f"{given.run} is no run of a classifier: for detectors there is detection_pictures.py.")
    if found.task.attachment is None:
        raise UserError(f"{given.run} was trained without the module: give a run with it, --method batchformer.")
    return found.task.net, found.data.predict_transform, {"mean": found.data.mean, "std": found.data.std}


def timm_model(given: argparse.Namespace) -> tuple[nn.Module, Any, dict[str, Any]]:
    net = attached_model(given.model or "vit_tiny_patch16_224", given.after, given.heads)
    load_weights(net, given.weights)
    config = timm.data.resolve_model_data_config(net)
    return net, timm.data.create_transform(**config), {"mean": config["mean"], "std": config["std"]}


def find_images(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: give one with images in it.")
    paths = [Path(path) for path in images_in(folder)]
    if len(paths) < 2:
        raise UserError(f"{folder} holds {len(paths)} images: attention over a batch needs two or more.")
    return paths


def spread(paths: list[Path], count: int) -> list[Path]:
    """So many of them, evenly over the folder, so that several classes are in the batch."""
    if count < 2:
        raise UserError(f"--images {count}: a batch needs two images or more.")
    count = min(count, len(paths))
    return [paths[k * len(paths) // count] for k in range(count)]


def attached_model(name: str, after: str | None, heads: int | None) -> nn.Module:
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "timm.list_models() names all."
        raise UserError(f"timm has no model {name!r}: {hint}")
    net = timm.create_model(name)
    blocks = getattr(net, "blocks", None)
    if after is None and isinstance(blocks, nn.Sequential | nn.ModuleList):
        after = f"blocks.{len(blocks) * 2 // 3}"
    if after is None:
        raise UserError(f"{name} has no list of blocks: say after which submodule, e.g. --after layer3 or stages.2.")
    if heads is None and isinstance(blocks, nn.Sequential | nn.ModuleList):
        heads = getattr(getattr(blocks[0], "attn", None), "num_heads", None)
    bf.attach(net, after=after, **({} if heads is None else {"heads": heads}))
    return net


def load_weights(net: nn.Module, file: Path | None) -> None:
    if file is None:
        print("random weights: the pictures show an untrained model and module; give --weights FILE for trained ones")
        return
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            state = load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(
            f"{file} cannot be read as weights ({type(error).__name__}): give a .pt or .safetensors file."
        ) from error
    if not isinstance(state, dict):
        raise UserError(f"{file} holds no weights by name but a {type(state).__name__}: give a state dict.")
    state = state.get("state_dict", state)
    wanted = list(net.state_dict())
    prefix = next((key.removesuffix(wanted[0]) for key in state if key.endswith(wanted[0])), "")
    state = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    state = leave_classifier(net, state)
    own = [key for key in wanted if key.startswith("batchformer.")]
    if own and own[0] not in state:
        print(f"{file} has no weights of the module: it stays random")
        state = {**state, **{key: net.state_dict()[key] for key in own}}
    try:
        net.load_state_dict(state)
    except RuntimeError as error:
        lines = str(error).splitlines()
        reason = lines[1].strip() if len(lines) > 1 else lines[0]
        raise UserError(f"{file} does not fit this model and --after: {reason[:200]}") from error


def leave_classifier(net: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The classifier as it is where it was trained for other classes: it stands behind all that is looked at."""
    names = net.pretrained_cfg.get("classifier") or ()
    behind = tuple(f"{name}." for name in ([names] if isinstance(names, str) else names))
    mine = net.state_dict()
    return {
        key: mine[key] if key.startswith(behind) and key in mine and mine[key].shape != value.shape else value
        for key, value in state.items()
    }


def digits_with_a_trained_module() -> tuple[nn.Module, Tensor, list[int]]:
    """A small convolutional network on scikit-learn's digits, with BatchFormerV2 on its 8 x 8 maps."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = F.interpolate(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, size=32, mode="bilinear")
    labels = torch.tensor(digits.target)
    net = nn.Sequential(
        *convolution(1, 32, 4, stride=4), *convolution(32, 32, 3), *convolution(32, 64, 3),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    bf.attach(net, after="5", heads=4)
    criterion = bf.TwoStreamLoss(nn.CrossEntropyLoss())
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    net.train()
    for _ in range(3):
        for rows in torch.randperm(1500).split(50):
            loss = criterion(net(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.inference_mode():
        accuracy = (net.eval()(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    print(f"digits: test accuracy {accuracy:.0%} without the module")
    return net, images[1500:1524], labels[1500:1524].tolist()


def convolution(channels: int, out: int, size: int, stride: int = 1) -> list[nn.Module]:
    padding = size // 2 if stride == 1 else 0
    return [nn.Conv2d(channels, out, size, stride, padding, bias=False), nn.BatchNorm2d(out), nn.ReLU()]


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
