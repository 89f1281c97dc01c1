"""Faster R-CNN with a C4 backbone, as MoCo transfers to detection, from torchvision's parts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchformer.errors import UserError
from batchformer.models.create import create_backbone

_STRIDE = 16
_SIZES, _RATIOS = ((32, 64, 128, 256, 512),), ((0.5, 1.0, 2.0),)


@dataclass
class RegionOutput:
    """What `FasterRCNN` gives: in training the `loss` and its parts, else the detections of each image.

    Boxes are in pixels of images of these `sizes` (height, width).
    """

    sizes: list[tuple[int, int]]
    loss: Tensor | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)
    detections: list[dict[str, Tensor]] = field(default_factory=list)


class FasterRCNN(nn.Module):
    """A ResNet up to its third stage, region proposals on it, and its last stage as the head of the regions.

    detectron2's R50-C4 with the settings of MoCo. Unlike in torchvision regions are cut with the half-pixel shift
    (`aligned`), anchors stand 16 pixels apart and have their sizes unrounded, box losses are L1 and not smooth, a
    BatchNorm follows the last stage, the predictor begins with deviations of 0.01 (classes) and 0.001 (boxes), 12,000
    proposals go into the suppression in training and 6,000 in testing, and every layer is trained.

    Args:
        backbone: a ResNet of timm, by name; keys `conv1`, `bn1`, `layer1` ... are its own, so that weights of a
            pre-trained one load into the part `backbone`.
        num_classes: without the background.
        backbone_args: passed on to it.
    """

    def __init__(self, backbone: str, num_classes: int, **backbone_args: Any) -> None:
        super().__init__()
        from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
        from torchvision.ops import RoIAlign

        net: Any = create_backbone(backbone, 0, **backbone_args)
        if not all(hasattr(net, name) for name in ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4")):
            raise UserError(f"Faster R-CNN with a C4 backbone needs a ResNet of timm, not {backbone}.")
        self.backbone = net
        channels = {"layer3": net.feature_info[-2]["num_chs"], "layer4": net.num_features}
        self.norm = nn.BatchNorm2d(channels["layer4"])
        anchors = _anchors()
        self.proposals = _proposal_network(anchors, channels["layer3"])
        self.cut = RoIAlign(14, 1 / _STRIDE, sampling_ratio=0, aligned=True)
        predictor = FastRCNNPredictor(channels["layer4"], num_classes + 1)
        for layer, std in ((predictor.cls_score, 0.01), (predictor.bbox_pred, 0.001)):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)
        self.regions = _region_heads(predictor)

    def forward(
        self, pixel_values: Tensor, pixel_mask: Tensor | None = None, labels: Sequence[dict[str, Tensor]] | None = None
    ) -> RegionOutput:
        """Batches of `DetectionData`; detections are in pixels of the given images, labels from 0."""
        from torchvision.models.detection.image_list import ImageList

        sizes = _sizes(pixel_values, pixel_mask)
        features = self._stage3(pixel_values)
        targets = None
        if self.training and labels is not None:
            targets = [_target(label, size) for label, size in zip(labels, sizes, strict=True)]
        proposed, losses = self.proposals(ImageList(pixel_values, sizes), {"0": features.float()}, targets)
        if targets is None:
            logits, boxes = self._classify(features, proposed)
            found = self.regions.postprocess_detections(logits.float(), boxes.float(), proposed, sizes)
            found = [{"boxes": b, "scores": s, "labels": k - 1} for b, s, k in zip(*found, strict=True)]
            return RegionOutput(sizes, detections=found)
        chosen, _, classes, shifts = self.regions.select_training_samples(proposed, targets)
        logits, boxes = self._classify(features, chosen)
        losses |= _region_losses(logits.float(), boxes.float(), torch.cat(classes), torch.cat(shifts))
        return RegionOutput(sizes, torch.stack(list(losses.values())).sum(), losses)

    def _stage3(self, images: Tensor) -> Tensor:
        net: Any = self.backbone
        x = net.maxpool(net.act1(net.bn1(net.conv1(images))))
        return net.layer3(net.layer2(net.layer1(x)))

    def _classify(self, features: Tensor, regions: list[Tensor]) -> tuple[Tensor, Tensor]:
        cut = self.cut(features.float(), [boxes.float() for boxes in regions]).to(features.dtype)
        pooled = self.norm(self.backbone.layer4(cut)).mean((2, 3))  # type: ignore[operator]
        return self.regions.box_predictor(pooled)


def _anchors() -> Any:
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    class Anchors(AnchorGenerator):
        """torchvision's, a stride apart whatever the padding, and not rounded.

        torchvision divides the side of the batch by that of the map and rounds down: 15 of 321 pixels and 21 cells.
        """

        def generate_anchors(self, scales: Any, aspect_ratios: Any, *options: Any, **keywords: Any) -> Tensor:
            scale, ratio = torch.tensor(scales), torch.tensor(aspect_ratios).sqrt()
            half = torch.stack([scale / ratio[:, None], scale * ratio[:, None]], dim=-1).flatten(0, 1) / 2
            return torch.cat([-half, half], dim=1)

        def grid_anchors(self, grid_sizes: Any, strides: Any) -> list[Tensor]:
            return super().grid_anchors(grid_sizes, [[_STRIDE, _STRIDE]] * len(grid_sizes))  # type: ignore[list-item]

    return Anchors(_SIZES, _RATIOS)


def _proposal_network(anchors: Any, channels: int) -> Any:
    from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead

    class Head(RPNHead):
        """torchvision's, with results in float32: it decodes boxes in their type, and bfloat16 moves them by pixels."""

        def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            objectness, shifts = super().forward(x)
            return [one.float() for one in objectness], [one.float() for one in shifts]

    class L1Proposals(RegionProposalNetwork):
        """torchvision's, with an L1 loss of the boxes."""

        def compute_loss(self, objectness: Any, pred_bbox_deltas: Any, labels: Any, regression_targets: Any) -> Any:
            positive, negative = (torch.cat(part) for part in self.fg_bg_sampler(labels))
            positive, negative = (part.nonzero()[:, 0] for part in (positive, negative))
            sampled = torch.cat([positive, negative])
            objectness, labels, shifts = objectness.flatten(), torch.cat(labels), torch.cat(regression_targets)
            box = F.l1_loss(pred_bbox_deltas[positive], shifts[positive], reduction="sum") / max(len(sampled), 1)
            return F.binary_cross_entropy_with_logits(objectness[sampled], labels[sampled]), box

    numbers = {"training": 12000, "testing": 6000}, {"training": 2000, "testing": 1000}
    head = Head(channels, anchors.num_anchors_per_location()[0])
    return L1Proposals(anchors, head, 0.7, 0.3, 256, 0.5, *numbers, nms_thresh=0.7)


def _region_heads(predictor: nn.Module) -> Any:
    """torchvision's rules for regions; pooling and head are done by `FasterRCNN`."""
    from torchvision.models.detection.roi_heads import RoIHeads

    return RoIHeads(None, None, predictor, 0.5, 0.5, 512, 0.25, None, 0.05, 0.5, 100)


def _region_losses(logits: Tensor, boxes: Tensor, classes: Tensor, shifts: Tensor) -> dict[str, Tensor]:
    """Cross entropy of all regions, and the L1 distance of the boxes of those with an object, per region."""
    objects = (classes > 0).nonzero()[:, 0]
    chosen = boxes.reshape(len(boxes), -1, 4)[objects, classes[objects]]
    distance = F.l1_loss(chosen, shifts[objects], reduction="sum") / max(len(classes), 1)
    return {"loss_classifier": F.cross_entropy(logits, classes), "loss_box_reg": distance}


def _sizes(images: Tensor, mask: Tensor | None) -> list[tuple[int, int]]:
    """Height and width of each image in a padded batch."""
    if mask is None:
        return [(images.shape[2], images.shape[3])] * len(images)
    return [(int(one[:, 0].sum()), int(one[0].sum())) for one in mask]


def _target(label: dict[str, Tensor], size: tuple[int, int]) -> dict[str, Tensor]:
    """torchvision's target: corners in pixels, classes from 1."""
    centre, sides = label["boxes"][:, :2], label["boxes"][:, 2:]
    corners = torch.cat([centre - sides / 2, centre + sides / 2], dim=1)
    return {"boxes": corners * corners.new_tensor([size[1], size[0]] * 2), "labels": label["class_labels"] + 1}
