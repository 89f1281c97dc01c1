"""The registry of data sets, and the options that all of them take."""

import importlib

import pytest

import batchformer.data
from batchformer.data.sets import SETS, layouts, miniature_names, write_miniature
from batchformer.errors import UserError

OPTIONS = {"batch_size": 3, "seed": 4, "workers": 1, "drop_last": False, "eval_batch_size": 5, "channels_last": True}
LABELLED = ("DigitsLT", "CIFAR10", "CIFAR100", "CIFAR10LT", "CIFAR100LT", "TinyImageNet", "ImageNet", "ListFiles",
            "ImageFolders", "DigitsDomains", "DomainFolders", "PACS", "VisDA", "DigitDomains")  # fmt: skip
DETECTION = ("CocoDetection", "CocoPanoptic", "VocDetection")


@pytest.mark.parametrize("name", SETS)
def test_every_set_has_a_public_class_and_a_layout(name):
    module_name, _, class_name = SETS[name].partition(":")
    module = importlib.import_module(f"batchformer.data.sets.{module_name}")
    assert getattr(batchformer.data, class_name) is getattr(module, class_name)
    written = module.LAYOUT[name] if isinstance(module.LAYOUT, dict) else module.LAYOUT
    assert layouts()[name] == written
    assert len(written.splitlines()) in (1, 2)


def test_all_public_names_are_there():
    assert all(hasattr(batchformer.data, name) for name in batchformer.data.__all__)
    assert set(batchformer.data.__all__) <= set(dir(batchformer.data))
    with pytest.raises(AttributeError, match="no attribute 'Digits'"):
        _ = batchformer.data.Digits


def test_a_miniature_goes_into_a_new_folder_only(tmp_path):
    assert "digits" not in miniature_names()
    with pytest.raises(UserError, match=r"no miniature of 'digits': choose one of cifar100"):
        write_miniature("digits", tmp_path / "digits")
    with pytest.raises(UserError, match="no miniature of 'mnist'"):
        write_miniature("mnist", tmp_path / "mnist")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is not an empty folder"):
        write_miniature("voc", tmp_path)


@pytest.mark.parametrize("name", LABELLED + DETECTION)
def test_every_set_takes_the_options_of_the_base(name):
    options = OPTIONS | ({"on_device": "auto", "views": 2, "index": True} if name in LABELLED else {})
    data = getattr(batchformer.data, name)(root="somewhere", **options)
    assert {key: getattr(data, key) for key in options} == options
    assert data.root == "somewhere"


def test_defaults_that_differ_from_those_of_the_base():
    defaults = {
        "DigitsLT": (128, 512, 0),
        "CIFAR100": (512, 500, 0),
        "CIFAR100LT": (512, 2000, 0),
        "TinyImageNet": (512, 500, 0),
        "ImageFolders": (128, 256, 4),
        "ImageNet": (128, 256, 8),
        "ListFiles": (128, 256, 8),
        "CocoDetection": (2, 4, 4),
    }
    for name, expected in defaults.items():
        data = getattr(batchformer.data, name)()
        assert (data.batch_size, data.eval_batch_size, data.workers) == expected, name
