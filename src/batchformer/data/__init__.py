"""LightningDataModules of data sets in their official layouts, of images with a label or with boxes.

What needs torch is imported lazily: `batchformer data` lists the layouts without it.
"""

from typing import TYPE_CHECKING

from batchformer.lazy import lazy_names

if TYPE_CHECKING:
    from batchformer.data.info import DataInfo
    from batchformer.data.loading.data_module import DataModule
    from batchformer.data.loading.device_loader import DeviceLoader
    from batchformer.data.loading.epoch_loader import EpochLoader, JoinedLoader
    from batchformer.data.loading.host_loader import HostLoader
    from batchformer.data.sets.arrays import ArrayData, FeatureData, Split
    from batchformer.data.sets.cifar import CIFAR10, CIFAR10LT, CIFAR100, CIFAR100LT
    from batchformer.data.sets.classification import ClassificationData, LongTailedData
    from batchformer.data.sets.coco import CocoDetection
    from batchformer.data.sets.coco_panoptic import CocoPanoptic
    from batchformer.data.sets.compositional import CompositionalData, PairFolders
    from batchformer.data.sets.detection import DetectionData
    from batchformer.data.sets.detection_folder import DetectionFolder
    from batchformer.data.sets.digit_domains import DigitDomains
    from batchformer.data.sets.digits import DigitNumbers, DigitsDomains, DigitsLT, DigitsStates
    from batchformer.data.sets.domain_folders import PACS, VLCS, DomainFolders, OfficeHome, TerraIncognita, VisDA
    from batchformer.data.sets.domains import DomainData
    from batchformer.data.sets.files import FileData
    from batchformer.data.sets.folder import ImageFolders
    from batchformer.data.sets.generalized import AttributeData, AttributeFiles
    from batchformer.data.sets.hands import FreiHand, HandData, RenderedHands
    from batchformer.data.sets.imagenet import ImageNet
    from batchformer.data.sets.list_files import ListFiles
    from batchformer.data.sets.tiny_imagenet import TinyImageNet
    from batchformer.data.sets.voc import VocDetection

__all__ = ["CIFAR10", "CIFAR10LT", "CIFAR100", "CIFAR100LT", "PACS", "VLCS", "ArrayData", "AttributeData",
           "AttributeFiles", "ClassificationData", "CocoDetection", "CocoPanoptic", "CompositionalData", "DataInfo",
           "DataModule", "DetectionData", "DetectionFolder", "DeviceLoader", "DigitDomains", "DigitNumbers",
           "DigitsDomains", "DigitsLT", "DigitsStates", "DomainData", "DomainFolders", "EpochLoader", "FeatureData",
           "FileData", "FreiHand", "HandData", "HostLoader", "ImageFolders", "ImageNet", "JoinedLoader", "ListFiles",
           "LongTailedData", "OfficeHome", "PairFolders", "RenderedHands", "Split", "TerraIncognita", "TinyImageNet",
           "VisDA", "VocDetection"]  # fmt: skip
__getattr__ = lazy_names(__name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
