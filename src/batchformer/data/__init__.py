"""Data sets with a long tail, in their official layouts: every one a LightningDataModule with the same interface."""

from batchformer.data.base import LongTailedData
from batchformer.data.cifar import CIFAR10LT, CIFAR100LT
from batchformer.data.device_loader import DeviceLoader
from batchformer.data.digits import DigitsLT

__all__ = ["CIFAR10LT", "CIFAR100LT", "DeviceLoader", "DigitsLT", "LongTailedData"]
