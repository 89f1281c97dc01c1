"""Data sets with a long tail, in their official layouts: every one a LightningDataModule with the same interface."""

from batchformer.data.base import LongTailedData
from batchformer.data.cifar import CIFAR10LT, CIFAR100LT
from batchformer.data.device_loader import DeviceLoader
from batchformer.data.digits import DigitsLT
from batchformer.data.folders import ImageFolders
from batchformer.data.host_loader import HostLoader
from batchformer.data.list_files import ListFiles

__all__ = [
    "CIFAR10LT",
    "CIFAR100LT",
    "DeviceLoader",
    "DigitsLT",
    "HostLoader",
    "ImageFolders",
    "ListFiles",
    "LongTailedData",
]
