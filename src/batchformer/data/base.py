"""What all data sets of images with one label share: what is known of their classes after `setup`."""

from typing import Any, Literal

from batchformer.data.module import DataModule
from batchformer.metrics.shots import count_shots


class ClassificationData(DataModule):
    """A training set, balanced or with a long tail, and a test set.

    After `setup`: `class_names`, `class_counts` (training images per class, in label order), `num_classes`,
    `train_images`, `test_images`, `fingerprint` (sha256 of what is trained on). Known from the start: `mean`, `std`,
    `image_size`, `predict_transform`. Order and augmentation of an epoch: see `DataModule`.

    `augment_repeats` is DeiT's repeated augmentation: above 1, each image stands that often in succession in the order,
    augmented anew each time, and an epoch of as many samples as before reads that part of the images only.
    """

    class_counts: list[int]

    def __init__(
        self,
        root: str | None = None,
        batch_size: int = 128,
        seed: int = 0,
        workers: int = 0,
        on_device: Literal["auto"] | bool = "auto",
        drop_last: bool = True,
        eval_batch_size: int = 512,
        channels_last: bool = False,
        augment_repeats: int = 1,
    ) -> None:
        super().__init__(
            root, batch_size=batch_size, seed=seed, workers=workers, drop_last=drop_last,
            eval_batch_size=eval_batch_size, channels_last=channels_last, augment_repeats=augment_repeats,
        )  # fmt: skip
        self.on_device = on_device

    def describe(self) -> dict[str, Any]:
        """The data set in numbers: classes by frequency (Many > 100, Medium 20 to 100, Few < 20), head and tail."""
        self.setup()
        counts = self.class_counts
        head, tail = counts.index(max(counts)), len(counts) - 1 - counts[::-1].index(min(counts))
        return {
            "classes": self.num_classes,
            "train_images": self.train_images,
            "test_images": self.test_images,
            "image_size": self.image_size,
            **count_shots(counts),
            "head": {"label": head, "name": self.class_names[head], "images": counts[head]},
            "tail": {"label": tail, "name": self.class_names[tail], "images": counts[tail]},
            "imbalance": counts[head] / counts[tail],
            "fingerprint": self.fingerprint,
        }


LongTailedData = ClassificationData  # the name from the time when every data set here had a tail
