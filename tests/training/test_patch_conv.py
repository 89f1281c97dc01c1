"""The first layer as a product: the function, the gradients and the keys of the convolution."""

import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from batchformer.tasks import Classification
from batchformer.training import network_task
from batchformer.training.compiling import PatchConv2d, convolve_again, cut_into_patches

from ..tasks.tiny_vit import NO_MIX, built

sizes = st.integers(1, 4)


@settings(max_examples=30, deadline=None)
@given(
    kernel=st.tuples(sizes, sizes),
    grid=st.tuples(sizes, sizes),
    rest=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    bias=st.booleans(),
    channels_last=st.booleans(),
)
def test_outputs_and_gradients_are_those_of_the_convolution(kernel, grid, rest, bias, channels_last):
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 5, kernel, stride=kernel, bias=bias).double()
    height, width = (k * cells + r % k for k, cells, r in zip(kernel, grid, rest, strict=True))
    images = torch.randn(2, 3, height, width, dtype=torch.double, requires_grad=True)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    inputs = [images, *conv.parameters()]

    def results():
        out = conv(images.contiguous(memory_format=layout))
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    wanted = results()
    conv.__class__ = PatchConv2d
    for ours, theirs in zip(results(), wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_of_a_transformer_the_first_layer_alone_changes_and_comes_back():
    net = timm.create_model("test_vit", num_classes=3).eval()
    images, keys = torch.randn(2, 3, 160, 160), list(net.state_dict())
    with torch.no_grad():
        before = net(images)
        changed = cut_into_patches(net)
        assert changed == [net.patch_embed.proj]
        assert list(net.state_dict()) == keys
        torch.testing.assert_close(net(images), before)
    convolve_again(changed)
    assert type(net.patch_embed.proj) is nn.Conv2d


def test_what_a_training_that_failed_left_comes_back_after_the_next():
    net = timm.create_model("test_vit", num_classes=3)
    cut_into_patches(net)
    convolve_again(cut_into_patches(net))
    assert type(net.patch_embed.proj) is nn.Conv2d


def test_convolutions_that_overlap_pad_or_see_features_stay():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        nn.Conv2d(3, 4, 2, stride=2, padding=1),
        nn.Conv2d(3, 4, 2, stride=2, dilation=2),
        nn.Conv2d(4, 4, 2, stride=2, groups=2),
        nn.Conv2d(16, 4, 2, stride=2),
        nn.Conv2d(3, 4, 1),
    )
    assert cut_into_patches(net) == []


def test_training_compiles_products_and_ends_with_the_layer_as_it_was(monkeypatch):
    task, compiled = built(compile=True, mix=NO_MIX), []
    monkeypatch.setattr(network_task, "compile_in_place", lambda net: compiled.append(type(net.patch_embed.proj)))
    monkeypatch.setattr(Classification, "device", torch.device("cuda"))  # asked for, never used
    task.on_fit_start()
    assert compiled == [PatchConv2d]
    task.on_train_end()
    assert type(task.net.patch_embed.proj) is nn.Conv2d
