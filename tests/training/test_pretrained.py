"""`--init-from pretrained`: timm's weights of the backbone, with a new classifier, only where a run begins."""

import warnings

import pytest
import timm
import torch

from batchformer.data.info import DataInfo
from batchformer.errors import UserError
from batchformer.tasks import Classification, LongTailed

BACKBONE = "test_resnet"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Weights of 1000 classes where timm looks for them."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "weights.pth"
    torch.save(timm.create_model(BACKBONE).state_dict(), path)
    return path


def made(kind, file, method, mean=(0.5, 0.5, 0.5), init_from="pretrained", restored=False):
    data = DataInfo(classes=list("abcde"), class_counts=[9, 8, 7, 6, 5], image_size=32, mean=mean, std=(0.5, 0.5, 0.5))
    task = kind(backbone=BACKBONE, backbone_args={"pretrained_cfg_overlay": {"file": str(file)}}, method=method)
    task.init_from, task.restored = {"network": init_from} if init_from else {}, restored
    task.construct(data)
    return task


@pytest.mark.parametrize("kind", [LongTailed, Classification])
def test_the_backbone_has_timms_weights_and_the_classifier_is_new(kind, file):
    stored = torch.load(file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tasks = {method: made(kind, file, method) for method in ("baseline", "batchformer")}
    for task in tasks.values():
        state = task.net.state_dict()
        assert torch.equal(state["conv1.weight"], stored["conv1.weight"])
        assert state["fc.weight"].shape == (5, stored["fc.weight"].shape[1])
        assert "pretrained" not in task.backbone_args  # nothing that is made later fetches them again
    first, second = (task.net.state_dict() for task in tasks.values())
    assert all(torch.equal(value, second[key]) for key, value in first.items())


def test_nothing_is_fetched_without_being_asked_or_for_a_checkpoint(file, tmp_path):
    stored = torch.load(file)
    for options in ({"init_from": None}, {"restored": True}):
        task = made(LongTailed, tmp_path / "nowhere.pth", "baseline", **options)
        assert not torch.equal(task.net.state_dict()["conv1.weight"], stored["conv1.weight"])


def test_another_normalisation_is_named_with_the_way_out(file):
    with pytest.warns(UserWarning, match=r"another mean: add --data\.mean \[0\.5, 0\.5, 0\.5\] --data\.std \[0\.5"):
        made(LongTailed, file, "baseline", mean=(0.485, 0.456, 0.406))


def test_networks_without_such_weights_say_so():
    task = LongTailed(backbone="resnet20")
    task.init_from = {"network": "pretrained"}
    with pytest.raises(UserError, match="there are no pretrained weights of resnet20"):
        task.construct(DataInfo(classes=["a", "b"], class_counts=[3, 2]))


def test_tau_normalisation_needs_a_trained_classifier():
    task = LongTailed(backbone="resnet20", algorithm="tau_norm")
    task.init_from = {"network": "pretrained"}
    with pytest.raises(UserError, match=r"give it with --init-from RUN\."):
        task.algorithm.check_data(task, None)
