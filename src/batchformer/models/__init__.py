"""What timm does not have, and one door to both: `create_backbone(name, num_classes)`."""

from batchformer.models.create import create_backbone
from batchformer.models.normed_linear import NormedLinear, use_normed_classifier
from batchformer.models.resnet10 import resnet10
from batchformer.models.resnet_cifar import CifarResNet, resnet20, resnet32, resnet44, resnet56

__all__ = [
    "CifarResNet",
    "NormedLinear",
    "create_backbone",
    "resnet10",
    "resnet20",
    "resnet32",
    "resnet44",
    "resnet56",
    "use_normed_classifier",
]
