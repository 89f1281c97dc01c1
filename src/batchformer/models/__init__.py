"""Models that timm and transformers do not have, and `create_backbone`, `create_detector` to build theirs by name."""

from typing import TYPE_CHECKING

from batchformer.lazy import lazy_names
from batchformer.models.create import create_backbone
from batchformer.models.detectors import DETECTORS, create_detector, parameter_groups
from batchformer.models.panoptic_head import with_mask_head
from batchformer.models.resnets import (
    CifarResNet,
    NormedLinear,
    resnet10,
    resnet18_small_images,
    resnet20,
    resnet32,
    resnet44,
    resnet50_stride_in_1x1,
    resnet56,
    use_normed_classifier,
)
from batchformer.models.ride import ExpertNetwork, RoutedExperts, expert_network

if TYPE_CHECKING:  # these import transformers, which not everybody has or needs
    from batchformer.models.smca_detr import SMCADetrConfig, SMCADetrForObjectDetection, SMCADetrModel
    from batchformer.models.two_stage_detr import TwoStageDeformableDetr

__all__ = ["DETECTORS", "CifarResNet", "ExpertNetwork", "NormedLinear", "RoutedExperts", "SMCADetrConfig",
           "SMCADetrForObjectDetection", "SMCADetrModel", "TwoStageDeformableDetr", "create_backbone",
           "create_detector", "expert_network", "parameter_groups", "resnet10", "resnet18_small_images", "resnet20",
           "resnet32", "resnet44", "resnet50_stride_in_1x1", "resnet56", "use_normed_classifier",
           "with_mask_head"]  # fmt: skip
__getattr__ = lazy_names(__name__)
