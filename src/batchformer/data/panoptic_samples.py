"""One image with its segments, as boxes and masks."""

import os
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torchvision import tv_tensors

from batchformer.data.detection_samples import DetectionSamples, Sample, Transform, box_target
from batchformer.data.panoptic import PanopticScenes
from batchformer.data.panoptic_png import read_segment_ids
from batchformer.errors import UserError


class PanopticSamples(DetectionSamples):
    """The segments travel through the transform as one map of their numbers and become masks afterwards."""

    scenes: PanopticScenes

    def __init__(
        self,
        scenes: PanopticScenes,
        transform: Transform,
        seed: int | None,
        truth: bool = False,
        pad_multiple: int = 1,
        masks: bool = True,
    ) -> None:
        super().__init__(scenes, transform, seed, truth, pad_multiple)
        self.masks = masks

    def _read(self, index: int) -> tuple[Any, np.ndarray]:
        return self._open(index), self._numbers(index)

    def _made(self, index: int, read: tuple[Any, np.ndarray]) -> Sample:
        image, numbers = read
        made = self.transform({"image": image, "segments": tv_tensors.Mask(torch.from_numpy(numbers)[None])})
        size = made["image"].shape[-2:]
        moved = made["segments"].as_subclass(Tensor)[0].numpy()
        rows = self.scenes.rows(index)
        there = np.bincount(moved.reshape(-1), minlength=rows.stop - rows.start + 1)[1:] > 0
        chosen = np.flatnonzero(there & ~self.scenes.crowd[rows])
        masks = moved == (chosen + 1)[:, None, None].astype(moved.dtype)
        target = box_target(_extents(masks), self.scenes.labels[rows][chosen], size)
        target["area"] = torch.from_numpy(masks.sum((1, 2))).float()
        if self.masks:
            target["masks"] = torch.from_numpy(masks)
        target = self._described(index, target, size)
        if self.truth:
            target["truth"] |= {"segmentation": numbers.astype(np.int32), "segments_info": self._infos(index)}
        return made["image"].as_subclass(Tensor), target

    def _numbers(self, index: int) -> Int[np.ndarray, "height width"]:
        """For each pixel the number of its segment, from 1, in the order they are listed; 0 is void."""
        path = os.fsdecode(self.scenes.segmentations[index])
        ids = read_segment_ids(path)
        if ids.shape != tuple(self.scenes.sizes[index]):
            height, width = self.scenes.sizes[index]
            raise UserError(
                f"segmentation {path} is {ids.shape[1]} x {ids.shape[0]} pixels, but {self.scenes.source} says "
                f"{width} x {height}: unpack both again."
            )
        listed = self.scenes.segment_ids[self.scenes.rows(index)]
        known = np.concatenate([[0], listed])
        order = np.argsort(known)
        numbers = order[np.minimum(np.searchsorted(known[order], ids), len(known) - 1)]
        strange = ids[known[numbers] != ids]
        if len(strange):
            raise UserError(
                f"segmentation {path} has a segment {strange[0]} that {self.scenes.source} does not list: "
                f"unpack both again."
            )
        return numbers.astype(np.uint8 if len(known) < 256 else np.int32)

    def _infos(self, index: int) -> list[dict[str, Any]]:
        rows, scenes = self.scenes.rows(index), self.scenes
        columns = zip(
            scenes.labels[rows].tolist(), scenes.crowd[rows].tolist(), scenes.area[rows].tolist(), strict=True
        )
        return [
            {"id": number, "label_id": label, "iscrowd": int(crowd), "area": area}
            for number, (label, crowd, area) in enumerate(columns, 1)
        ]


def _extents(masks: np.ndarray) -> np.ndarray:
    """x1, y1, x2, y2 around each mask, whole pixels."""
    height, width = masks.shape[1:]
    rows, columns = np.asarray(masks.any(2)), np.asarray(masks.any(1))
    low = np.stack([columns.argmax(1), rows.argmax(1)], axis=1)
    high = np.stack([width - columns[:, ::-1].argmax(1), height - rows[:, ::-1].argmax(1)], axis=1)
    return np.concatenate([low, high], axis=1).astype(np.float64)
