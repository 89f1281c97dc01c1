"""Where does a network look? Grad-CAM of two networks, trained with and without BatchFormer, as in the paper's Fig. 5.

    python examples/grad_cam.py [--out grad-cam.png]

Handwritten digits with a long tail (of the digit 9 there are ten images), a few seconds on a CPU. The module has gone
when the network is looked at: what differs is what its training left behind. Needs scikit-learn and Pillow (the extra
`train` of this package).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import batchformer as bf
from batchformer.analysis import grad_cam
from batchformer.analysis.pictures import draw_grad_cam, to_pictures

EPOCHS, BATCH = 15, 32
LAST_MAPS = "8"  # the ReLU before the pooling


def long_tailed_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training images, 100 of the digit 0 down to 10 of the 9, and the test images of all."""
    digits = load_digits()
    images = F.interpolate(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, size=32, mode="bilinear")
    labels = torch.tensor(digits.target)
    training = torch.cat([(labels[:1400] == k).nonzero()[: round(100 * 0.1 ** (k / 9)), 0] for k in range(10)])
    return (images[training], labels[training]), (images[1400:], labels[1400:])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *convolution(1, 32, 4, stride=4), *convolution(32, 64, 3), *convolution(64, 64, 3),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def convolution(channels: int, out: int, size: int, stride: int = 1) -> list[nn.Module]:
    padding = size // 2 if stride == 1 else 0
    return [nn.Conv2d(channels, out, size, stride, padding, bias=False), nn.BatchNorm2d(out), nn.ReLU()]


def train(net: nn.Module, images: Tensor, labels: Tensor) -> nn.Module:
    criterion = bf.TwoStreamLoss(nn.CrossEntropyLoss())  # without a second stream it is the criterion itself
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    net.train()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(labels)).split(BATCH):
            loss = criterion(net(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("grad-cam.png"))
    given = parser.parse_args()
    if given.out.suffix != ".png" or given.out.is_dir() or not given.out.absolute().parent.is_dir():
        sys.exit(f"--out {given.out}: give the name of a .png file in a folder that is there.")
    (images, labels), (shown, classes) = long_tailed_digits()
    rare = torch.cat([(classes == k).nonzero()[:2, 0] for k in (0, 7, 8, 9)])
    maps = {}
    for name, attached in (("without BatchFormer", False), ("with BatchFormer", True)):
        net = network()
        if attached:
            bf.attach(net)
        train(net, images, labels)
        if attached:
            bf.detach(net)
        with torch.inference_mode():
            right = net(shown).argmax(1) == classes
        of_all, of_rare = (hits.float().mean().item() for hits in (right, right[classes > 6]))
        print(f"{name}: test accuracy {of_all:.1%}, of the three rarest digits {of_rare:.1%}")
        maps[f"{name}: what speaks for the right digit"] = grad_cam(net, shown[rare], LAST_MAPS, classes[rare])
    draw_grad_cam(maps, to_pictures(shown[rare])).save(given.out, optimize=True)
    print(given.out)


if __name__ == "__main__":
    main()
