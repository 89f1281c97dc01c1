"""A vision transformer small enough to train in a second, and its task."""

from batchformer.tasks import AdamWOptions, Classification, CosineOptions, InsertionOptions, MixOptions

from .conftest import COUNTS, TinyData, info, make_trainer
from .whole_step import whole_step

VIT = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2}
NO_MIX = MixOptions(mixup=0.0, cutmix=0.0)


def vit_task(kind: type[Classification] = Classification, **arguments) -> Classification:
    defaults = {
        "backbone": "deit_tiny_patch16_224",
        "backbone_args": VIT,
        "batchformer": InsertionOptions(blocks=[1]),
        "optimizer": AdamWOptions(lr=1e-2, lr_per=None),
        "schedule": CosineOptions(warmup_epochs=0),
    }
    return kind(**{**defaults, **arguments})


def built(**arguments) -> Classification:
    task = vit_task(**arguments)
    task.construct(info(COUNTS))
    return task


def fit(task: Classification, data: TinyData | None = None, **arguments):
    trainer = make_trainer(**{"max_epochs": 1, "limit_val_batches": 0, **arguments})
    trainer.fit(task, datamodule=data or TinyData())
    return trainer


WholeClassification = whole_step(Classification)
