"""The networks of this room."""

import pytest
import timm
import torch
import torch.nn.functional as F
from huggingface_hub import constants
from torch import nn

import batchformer as bf
from batchformer.errors import UserError
from batchformer.models import NormedLinear, create_backbone, resnet10, resnet20, resnet32, use_normed_classifier


@pytest.mark.parametrize(("depth", "millions"), [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85)])
def test_cifar_resnets_have_the_papers_number_of_parameters(depth, millions):
    net = create_backbone(f"resnet{depth}", 10)
    assert sum(p.numel() for p in net.parameters()) / 1e6 == pytest.approx(millions, abs=0.005)
    assert sum(isinstance(m, nn.Conv2d | nn.Linear) for m in net.modules()) == depth


def test_the_shortcut_takes_every_second_pixel_and_pads_channels_on_both_sides():
    block = resnet20().layer2[0].eval()
    with torch.no_grad():
        block.bn2.weight.zero_()  # only the shortcut is left
        x = torch.rand(2, 16, 6, 6)
        out = block(x)
    assert out.shape == (2, 32, 3, 3)
    torch.testing.assert_close(out[:, 8:24], x[:, :, ::2, ::2])
    assert out[:, :8].eq(0).all()
    assert out[:, 24:].eq(0).all()


def test_weights_start_kaiming_normal():
    torch.manual_seed(0)
    net = resnet32(100)
    for weight in (net.layer3[2].conv1.weight, net.fc.weight):
        fan_in = weight[0].numel()
        assert weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.05)


def test_features_and_head_make_up_the_forward_pass():
    net = resnet20(7).eval()
    x = torch.randn(2, 3, 32, 32)
    features = net.forward_features(x)
    assert features.shape == (2, 64, 8, 8)
    pooled = net.forward_head(features, pre_logits=True)
    assert pooled.shape == (2, net.num_features)
    assert torch.equal(net.get_classifier()(pooled), net(x))


def test_attach_finds_the_classifier_of_a_cifar_resnet():
    net = resnet20(7)
    assert bf.find_classifiers(net) == ["fc"]
    attachment = bf.attach(net)
    assert attachment.points[0].module.dim == 64


def test_cifar_resnet_exports():
    net = resnet20(7).eval()
    x = torch.randn(2, 3, 16, 16)
    exported = torch.export.export(net, (x,)).module()
    torch.testing.assert_close(exported(x), net(x))


def test_resnet10_is_one_basic_block_per_stage_with_512_features():
    net = resnet10(12)
    assert net.num_features == 512
    assert [len(getattr(net, f"layer{i}")) for i in range(1, 5)] == [1, 1, 1, 1]
    assert bf.find_classifiers(net) == ["fc"]
    keys_of_18 = create_backbone("resnet18", 12).state_dict().keys()
    assert net.state_dict().keys() <= keys_of_18


def test_normed_linear_gives_cosines():
    layer = NormedLinear(6, 4)
    x = 10 * torch.randn(5, 6)
    cosines = F.cosine_similarity(x[:, None], layer.weight[None], dim=-1)
    torch.testing.assert_close(layer(x), cosines)
    assert list(layer.state_dict()) == ["weight"]


@pytest.mark.parametrize("name", ["resnet20", "mobilenetv3_small_050"])
def test_a_normed_classifier_takes_the_place_of_the_linear_one_and_is_found_by_attach(name):
    net = create_backbone(name, 9)
    paths = bf.find_classifiers(net)
    use_normed_classifier(net)
    assert bf.find_classifiers(net) == paths
    assert isinstance(net.get_submodule(paths[0]), NormedLinear)
    assert net.eval()(torch.randn(2, 3, 32, 32)).abs().max() <= 1 + 1e-6


def test_an_unknown_backbone_offers_the_nearest_names():
    with pytest.raises(UserError, match="resnet32"):
        create_backbone("resnet_32", 10)


def test_backbone_arguments_reach_the_model():
    net = create_backbone("resnet20", 10, in_chans=1)
    assert net(torch.randn(1, 1, 8, 8)).shape == (1, 10)


def test_pretrained_weights_that_cannot_be_had_are_one_sentence_with_the_way_out(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"weights of resnet18 could not be loaded .*pretrained_cfg_overlay\.file"):
        create_backbone("resnet18", 3, pretrained=True, cache_dir=tmp_path)


def test_a_file_of_another_kind_than_timm_expects_is_one_sentence(tmp_path):
    torch.save({"weight": torch.ones(1)}, tmp_path / "weights.npz")
    overlay = {"file": str(tmp_path / "weights.npz")}
    with pytest.raises(UserError, match="weights of vit_tiny_patch16_224 could not be loaded"):  # as arrays
        create_backbone("vit_tiny_patch16_224", 3, pretrained=True, depth=1, pretrained_cfg_overlay=overlay)


def test_pretrained_weights_come_from_a_local_file_with_a_new_classifier(tmp_path):
    import timm

    trained = timm.create_model("resnet18", num_classes=1000)
    torch.save(trained.state_dict(), tmp_path / "weights.pth")
    net = create_backbone(
        "resnet18", 3, pretrained=True, pretrained_cfg_overlay={"file": str(tmp_path / "weights.pth")}
    )
    assert torch.equal(net.conv1.weight, trained.conv1.weight)
    assert net.fc.weight.shape == (3, 512)


def test_the_hub_is_looked_for_only_where_weights_are_wanted(monkeypatch):
    offline = []
    monkeypatch.setattr("batchformer.hub._reachable", lambda address: False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(timm, "create_model", lambda name, **given: offline.append(constants.HF_HUB_OFFLINE))
    for pretrained in (False, True):
        create_backbone("test_resnet", 5, pretrained=pretrained)
    assert offline == [False, True]
    assert constants.HF_HUB_OFFLINE is False
