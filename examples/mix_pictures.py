"""Pictures of mixed images and their labels: your images, any method, any timm model.

    python examples/mix_pictures.py                                           digits, a ViT trained for seconds
    python examples/mix_pictures.py PHOTOS --model deit_small_patch16_224 --weights FILE --method transmix
    python examples/mix_pictures.py PHOTOS --model resnet50 --method puzzlemix --out runs/NAME/mixing    for the report

PHOTOS is a folder of images, with a folder for each class, or without: then each image is a class, called as its file.
Without --weights the model is untrained, and so is its attention.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import batchformer as bf
from batchformer.analysis.mix_pictures import write_mix_picture
from batchformer.data.images import images_in, open_image
from batchformer.errors import UserError

METHODS = ("transmix", "cutmix", "mixup", "saliencymix", "attentive-cutmix", "puzzlemix")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="folder of images; left out: digits")
    parser.add_argument("--model", default="deit_tiny_patch16_224", help="name of a timm model")
    parser.add_argument("--weights", type=Path, help="file with trained weights; left out: random ones")
    parser.add_argument("--method", choices=METHODS, default="transmix")
    parser.add_argument("--images", type=int, default=6, help="how many images are mixed (6)")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("mixing"), help="folder to write to (mixing)")
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    mean = std = None
    if given.folder is None:
        net, images, names = digits_and_a_model()
    else:
        if not timm.is_model(given.model):
            raise UserError(f"timm has no model {given.model!r}: timm.list_models() names all.")
        net = make_model(given.model, given.weights)
        config = timm.data.resolve_model_data_config(net)
        paths = spread(given.folder, given.images)
        images = torch.stack([timm.data.create_transform(**config)(open_image(path, upright=True)) for path in paths])
        names = [path.name if path.parent == given.folder else path.parent.name for path in paths]
        mean, std = config["mean"], config["std"]
    labels = torch.tensor([sorted(set(names)).index(name) for name in names])
    net.eval()
    mix = make_mix(given.method, net, max(len(set(names)), net.num_classes), mean, std)
    mixed = mix(images, labels)
    with torch.no_grad():
        net(mixed.images)  # TransMix reads its attention here
    print(write_mix_picture(given.out, mixed, images, names=names, mean=mean, std=std, method=given.method))


def make_model(name: str, weights: Path | None) -> nn.Module:
    if weights is not None and not weights.is_file():
        raise UserError(f"there is no file {weights}: give --weights a file with the weights of a {name}.")
    try:
        return timm.create_model(name, checkpoint_path=str(weights or ""))
    except Exception as problem:  # a damaged file, or the weights of another model
        if weights is None:
            raise
        raise UserError(
            f"{weights} does not hold the weights of a {name}: {' '.join(str(problem).split())[:200]}."
        ) from problem


def make_mix(method: str, net: nn.Module, classes: int, mean: tuple | None, std: tuple | None) -> bf.mix.Mix:
    if method == "transmix":
        return bf.mix.TransMix(net, classes, per_sample=True)
    if method == "attentive-cutmix":  # the model itself stands in for a pretrained extractor
        return bf.mix.AttentiveCutMix(bf.mix.feature_map(net), classes, size=None)
    if method == "puzzlemix":
        return bf.mix.PuzzleMix(net, classes, mean=mean, std=std)
    if method == "saliencymix":
        return bf.mix.SaliencyMix(classes, per_sample=True, mean=mean, std=std)
    return {"cutmix": bf.mix.CutMix, "mixup": bf.mix.Mixup}[method](classes, per_sample=True)


def spread(folder: Path, count: int) -> list[Path]:
    """So many images, evenly over the folder, so that several classes are among them."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: give one with images in it.")
    paths = [Path(path) for path in images_in(folder)]
    count = min(count, len(paths))
    if count < 2:
        raise UserError(f"{folder} holds {len(paths)} images and {count} would be mixed: two or more are needed.")
    return [paths[k * len(paths) // count] for k in range(count)]


def digits_and_a_model() -> tuple[nn.Module, Tensor, list[str]]:
    """A small ViT trained with TransMix on scikit-learn's digits."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = F.interpolate(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, size=32, mode="bilinear")
    images, labels = images.expand(-1, 3, -1, -1).contiguous(), torch.tensor(digits.target)
    net = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=4, num_classes=10
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    with bf.mix.TransMix(net, 10, prob=0.5) as mix:
        for _ in range(6):
            for rows in torch.randperm(1500).split(50):
                mixed = mix(images[rows], labels[rows])
                loss = F.cross_entropy(net(mixed.images), mixed.targets())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    with torch.inference_mode():
        accuracy = (net.eval()(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    print(f"digits: test accuracy {accuracy:.0%} after six epochs, half of the batches mixed")
    return net, images[1500:1506], [str(label) for label in labels[1500:1506].tolist()]


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
