"""Data sets in their official layouts, balanced or with a long tail: each a LightningDataModule of one interface."""

from batchformer.data.base import ClassificationData, LongTailedData
from batchformer.data.cifar import CIFAR10, CIFAR10LT, CIFAR100, CIFAR100LT
from batchformer.data.device_loader import DeviceLoader
from batchformer.data.digits import DigitsLT
from batchformer.data.folders import ImageFolders
from batchformer.data.host_loader import HostLoader
from batchformer.data.imagenet import ImageNet
from batchformer.data.list_files import ListFiles
from batchformer.data.tiny_imagenet import TinyImageNet

__all__ = [
    "CIFAR10",
    "CIFAR10LT",
    "CIFAR100",
    "CIFAR100LT",
    "ClassificationData",
    "DeviceLoader",
    "DigitsLT",
    "HostLoader",
    "ImageFolders",
    "ImageNet",
    "ListFiles",
    "LongTailedData",
    "TinyImageNet",
]
