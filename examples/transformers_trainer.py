"""BatchFormerV2 inside a transformers ViT, trained by transformers' own Trainer: attach before, detach after.

    python examples/transformers_trainer.py

Needs transformers, accelerate and scikit-learn; handwritten digits, nothing is downloaded, seconds on a CPU.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from transformers import (
    EvalPrediction,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)

import batchformer as bf


def make_model() -> ViTForImageClassification:
    """A stock model; `ViTForImageClassification.from_pretrained(...)` serves as well."""
    return ViTForImageClassification(
        ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=3,
            num_labels=10,
        )
    )


def make_data() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).div(8).sub(1).unsqueeze(1)
    samples = [
        {"pixel_values": image, "labels": int(label)} for image, label in zip(images, digits.target, strict=True)
    ]
    train, test = train_test_split(samples, test_size=0.25, random_state=0)
    return train, test


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    set_seed(0)
    model = make_model()
    keys = list(model.state_dict())
    # After the second of three blocks (they count from 0), with the backbone's number of heads. In training the model
    # returns two rows for each image, and the labels the Trainer gives it follow.
    attachment = bf.attach(model, blocks=[1], heads=3)
    train, test = make_data()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                folder,
                num_train_epochs=4,
                per_device_train_batch_size=32,
                per_device_eval_batch_size=256,
                learning_rate=2e-3,
                warmup_steps=20,
                lr_scheduler_type="cosine",
                save_strategy="no",
                logging_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=train,
            eval_dataset=test,
            compute_metrics=accuracy,
        )
        trainer.train()
        attached = trainer.evaluate()["eval_accuracy"]
        attachment.detach()
        assert list(model.state_dict()) == keys
        model.save_pretrained(folder)  # a stock file
        plain = ViTForImageClassification.from_pretrained(folder)
    trainer.model = plain
    assert trainer.evaluate()["eval_accuracy"] == attached
    print(f"accuracy {attached:.1%}, attached and as the stock model that was saved after detach")


if __name__ == "__main__":
    main()
