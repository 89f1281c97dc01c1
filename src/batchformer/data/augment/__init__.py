"""Augmentations: batched on the device (one file per idea), and torchvision v2 pipelines for the host."""

from batchformer.data.augment.batched import BATCHED_AUGMENTATIONS, BatchedAugmentation, batched_augmentation

__all__ = ["BATCHED_AUGMENTATIONS", "BatchedAugmentation", "batched_augmentation"]
