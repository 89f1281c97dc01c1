"""BatchFormer in a plain PyTorch loop: a timm model, generated images with a long tail, a few seconds on a CPU.

    python examples/plain_loop.py [FILE]        saves the plain weights to FILE (plain_loop.pt)

Needs timm (the extra `train` of this package).
"""

from __future__ import annotations

import sys

import timm
import torch
from torch import Tensor, nn

import batchformer as bf

COUNTS = (60, 30, 15, 8, 4)  # training images per class: a long tail
LR = 0.01


def make_images(counts: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Noise around one colour per class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    colours = torch.linspace(-1, 1, len(counts))[labels]
    images = torch.randn(len(labels), 3, 32, 32, generator=generator)
    images[:, 0] += colours[:, None, None]
    images[:, 1] -= colours[:, None, None]
    return images, labels


def main(file: str = "plain_loop.pt") -> None:
    torch.manual_seed(0)
    images, labels = make_images(COUNTS, seed=0)
    model = timm.create_model("resnet10t", num_classes=len(COUNTS))
    keys = list(model.state_dict())

    attachment = bf.attach(model)  # 1. in: before the classifier, found by itself
    print(attachment)
    criterion = bf.TwoStreamLoss(nn.CrossEntropyLoss())  # 2. the loss sees both streams

    own = set(attachment.parameters())  # the module learns at a tenth of the rate, as in the paper
    optimizer = torch.optim.SGD(
        [
            {"params": [p for p in model.parameters() if p not in own]},
            {"params": list(own), "lr": LR / 10},
        ],
        lr=LR,
        momentum=0.9,
    )
    model.train()
    for epoch in range(6):
        right = 0
        for rows in torch.randperm(len(labels)).split(32):
            logits = model(images[rows])  # 2B rows: plain, then related
            loss = criterion(logits, labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += int((attachment.plain(logits).argmax(1) == labels[rows]).sum())  # metrics: plain rows only
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, training accuracy {right / len(labels):.0%}")

    attachment.detach()  # 3. out: the model you had
    assert list(model.state_dict()) == keys
    torch.save(model.state_dict(), file)

    test_images, test_labels = make_images((20,) * len(COUNTS), seed=1)
    fresh = timm.create_model("resnet10t", num_classes=len(COUNTS))
    fresh.load_state_dict(torch.load(file, weights_only=True))  # strict, into the stock model
    with torch.inference_mode():
        accuracy = (fresh.eval()(test_images).argmax(1) == test_labels).float().mean().item()
    print(f"{file}: plain weights, {len(keys)} tensors, test accuracy {accuracy:.0%}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
