"""TransMix in a plain PyTorch loop: a small vision transformer from timm, generated images, a few seconds on a CPU.

    python examples/transmix_loop.py

Needs timm (the extra `train` of this package).
"""

from __future__ import annotations

import timm
import torch
from torch import Tensor, nn

import batchformer as bf

CLASSES = 4
MODEL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": CLASSES}


def make_images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """A bright square in noise; its colour is the class, its place says nothing."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    images = 0.3 * torch.randn(count, 3, 32, 32, generator=generator)
    places = torch.randint(16, (count, 2), generator=generator).tolist()
    for image, label, (top, left) in zip(images, labels.tolist(), places, strict=True):
        image[:, top : top + 16, left : left + 16] += torch.eye(CLASSES)[label, :3, None, None] * 2 - 0.5
    return images, labels


def main() -> None:
    torch.manual_seed(0)
    images, labels = make_images(384, seed=0)
    model = timm.create_model("vit_tiny_patch16_224", **MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()  # takes soft targets

    # 1. one of two methods for each batch, as DeiT is trained; TransMix finds the attention of the last block
    mix = bf.mix.MixSwitch([bf.mix.Mixup(CLASSES, alpha=0.8), bf.mix.TransMix(model, CLASSES)])
    model.train()
    for epoch in range(10):
        for rows in torch.randperm(len(labels)).split(64):
            mixed = mix(images[rows], labels[rows])
            logits = model(mixed.images)  # 2. one forward pass, as ever
            loss = criterion(logits, mixed.targets())  # 3. the labels, by what the model has just looked at
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")

    mixed = mix.mixes[1](images[:4], labels[:4])
    model(mixed.images)
    print("share of image B by area:", *(f"{share:.2f}" for share in mixed.share.tolist()))
    print("and in the label:        ", *(f"{share:.2f}" for share in mixed.label_share().tolist()))

    mix.close()  # 4. nothing is left in the model
    test_images, test_labels = make_images(256, seed=1)
    with torch.inference_mode():
        accuracy = (model.eval()(test_images).argmax(1) == test_labels).float().mean().item()
    print(f"test accuracy {accuracy:.0%}")


if __name__ == "__main__":
    main()
