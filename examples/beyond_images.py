"""BatchFormer in models of text, sound, video and segmentation: small ones of transformers, a few steps each.

    python examples/beyond_images.py

The models are made from small configurations and trained on noise with a rule in it, so nothing is downloaded. With
`from_pretrained` and your own data the lines are the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from torch import Tensor, nn

import batchformer as bf

CLASSES, SAMPLES, STEPS = 3, 16, 12
LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
SIGNAL = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 4}
LABELS = torch.arange(SAMPLES) % CLASSES


def text() -> tuple[nn.Module, bf.Attachment, Tensor, Tensor]:
    config = transformers.BertConfig(num_labels=CLASSES, vocab_size=60, max_position_embeddings=16, **LAYERS)
    model = transformers.BertForSequenceClassification(config)
    tokens = torch.randint(10, (SAMPLES, 8)) + 20 * LABELS[:, None]  # each class has words of its own
    return model, bf.attach(model, after=["bert.encoder.layer.0"]), tokens, LABELS


def audio() -> tuple[nn.Module, bf.Attachment, Tensor, Tensor]:
    config = transformers.Wav2Vec2Config(
        num_labels=CLASSES, num_conv_pos_embedding_groups=2, mask_time_prob=0.0, layerdrop=0.0, **LAYERS, **SIGNAL
    )
    model = transformers.Wav2Vec2ForSequenceClassification(config)
    times = torch.linspace(0, 60, 400)
    waves = torch.sin(times * (LABELS[:, None] + 1.0)) + 0.1 * torch.randn(SAMPLES, 400)  # each class its frequency
    return model, bf.attach(model), waves, LABELS  # for after=[...] give example_inputs=waves as well


def video() -> tuple[nn.Module, bf.Attachment, Tensor, Tensor]:
    config = transformers.VideoMAEConfig(num_labels=CLASSES, image_size=16, patch_size=8, num_frames=4, **LAYERS)
    model = transformers.VideoMAEForVideoClassification(config)
    videos = torch.randn(SAMPLES, 4, 3, 16, 16)
    videos[torch.arange(SAMPLES), :, LABELS] += 1.0  # each class its colour
    attachment = bf.attach(model, after=["videomae.encoder.layer.0"], example_inputs=videos[:2])
    return model, attachment, videos, LABELS


def segmentation() -> tuple[nn.Module, bf.Attachment, Tensor, Tensor]:
    config = transformers.SegformerConfig(
        num_labels=CLASSES, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=32,
    )  # fmt: skip
    model = transformers.SegformerForSemanticSegmentation(config)
    masks = torch.randint(CLASSES, (SAMPLES, 4, 4)).repeat_interleave(16, 1).repeat_interleave(16, 2)
    pictures = nn.functional.one_hot(masks, CLASSES).permute(0, 3, 1, 2) + 0.1 * torch.randn(SAMPLES, 3, 64, 64)
    return model, bf.attach(model, after=["segformer.stages.1"]), pictures, masks


def train(make: Callable[[], tuple[nn.Module, bf.Attachment, Tensor, Tensor]]) -> None:
    torch.manual_seed(0)
    model, attachment, inputs, labels = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # after attach: the module's weights are among them
    losses = []
    for _ in range(STEPS):
        outputs = model.train()(inputs, labels=labels)  # the labels follow the streams, the loss is the mean of both
        optimizer.zero_grad()
        outputs.loss.backward()
        optimizer.step()
        losses.append(outputs.loss.item())
    rows = len(outputs.logits), len(attachment.plain(outputs).logits)
    assert losses[-1] < losses[0], f"{make.__name__} learnt nothing: {losses}"
    model = attachment.detach().eval()  # the stock model again, to be saved and used as ever
    with torch.no_grad():
        predicted = model(inputs).logits.argmax(1)
    wanted = labels if labels.ndim == 1 else labels[:, ::4, ::4]  # SegFormer answers for every fourth pixel
    accuracy = 100 * (predicted == wanted).float().mean()
    print(f"{make.__name__}: {rows[0]} rows of {rows[1]} samples, loss {losses[0]:.2f} to {losses[-1]:.2f}, "
          f"accuracy of the {type(model).__name__} without the module {accuracy:.0f}%")  # fmt: skip


if __name__ == "__main__":
    for one in (text, audio, video, segmentation):
        train(one)
