"""Data sets in their official layouts, of images with a label or with boxes: each a LightningDataModule."""

from batchformer.data.base import ClassificationData, LongTailedData
from batchformer.data.cifar import CIFAR10, CIFAR10LT, CIFAR100, CIFAR100LT
from batchformer.data.coco import CocoDetection
from batchformer.data.detection import DetectionData
from batchformer.data.device_loader import DeviceLoader
from batchformer.data.digits import DigitsLT
from batchformer.data.folders import ImageFolders
from batchformer.data.host_loader import HostLoader
from batchformer.data.imagenet import ImageNet
from batchformer.data.list_files import ListFiles
from batchformer.data.panoptic import CocoPanoptic
from batchformer.data.tiny_imagenet import TinyImageNet
from batchformer.data.voc import VocDetection

__all__ = [
    "CIFAR10",
    "CIFAR10LT",
    "CIFAR100",
    "CIFAR100LT",
    "ClassificationData",
    "CocoDetection",
    "CocoPanoptic",
    "DetectionData",
    "DeviceLoader",
    "DigitsLT",
    "HostLoader",
    "ImageFolders",
    "ImageNet",
    "ListFiles",
    "LongTailedData",
    "TinyImageNet",
    "VocDetection",
]
