"""attach(after=...) beyond the behaviour suite: places, sharing, streams, BatchNorm, layouts, wrong calls."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn

import batchformer as bf
from batchformer.attach.per_stream import SeparateNorm
from batchformer.errors import UserError

from .small_models import Blocks, tokens


def test_the_first_place_the_model_calls_opens_whatever_the_order_of_the_list() -> None:
    attachment = bf.attach(Blocks(), after=["blocks.2", "blocks.0"], heads=2)
    assert [(point.paths, point.site.opens) for point in attachment.points] == [
        (("blocks.0",), True),
        (("blocks.2",), False),
    ]


@pytest.mark.traced
def test_kernels_of_a_gpu_are_attached_to_a_model_that_is_yet_to_move_there() -> None:
    model = Blocks().train()
    bf.attach(model, blocks=[0, 2], heads=2, backend="triton")
    with pytest.raises(UserError, match='backend="triton" cannot run here'):
        model(tokens())


def test_every_insertion_relates_the_related_rows_and_leaves_the_plain_ones() -> None:
    model, x = Blocks().train(), tokens()
    attachment = bf.attach(model, blocks=[0, 2], heads=2, dropout=0.0)
    first, second = (point.module for point in attachment.points)
    with attachment.disabled():
        expected = model(x)
        related = first.relate(model.blocks[0](model.embed(x)))
        related = second.relate(model.blocks[2](model.blocks[1](related)))
        related = model.fc(model.blocks[3](related).mean(1))
    torch.testing.assert_close(model(x), torch.cat([expected, related]))


def test_a_shared_module_is_one_module_at_all_places() -> None:
    model = Blocks()
    attachment = bf.attach(model, blocks="all", share=True, heads=2)
    assert len({id(point.module) for point in attachment.points}) == 1
    assert len(attachment.points) == 4
    assert all(key.startswith("batchformer.0.") for key in model.state_dict() if "batchformer" in key)
    assert len(model.train()(tokens())) == 8


@pytest.mark.parametrize("streams", ["split", "single"])
def test_split_and_single_keep_the_number_of_rows(streams: str) -> None:
    model, x = Blocks(captures=True).train(), tokens()
    attachment = bf.attach(model, blocks=[1, 2], streams=streams, heads=2, dropout=0.0)
    outputs = model(x)
    with attachment.disabled():
        plain = model(x)
    assert len(outputs) == 4
    same = (outputs - plain).abs().amax(1) < 1e-6
    assert same.tolist() == ([True, True, False, False] if streams == "split" else [False] * 4)


@pytest.mark.parametrize("batch_norm", ["separate", "joint"])
def test_batch_norm_behind_the_insertion(batch_norm: str) -> None:
    model, twin, x = Blocks(norm=True).train(), Blocks(norm=True).train(), tokens()
    twin.load_state_dict(model.state_dict())
    attachment = bf.attach(model, blocks=[1], heads=2, dropout=0.0, batch_norm=batch_norm)
    outputs, expected = model(x), twin(x)
    separate = batch_norm == "separate"
    assert any(isinstance(piece, SeparateNorm) for piece in attachment._pieces) == separate
    assert torch.allclose(outputs[:4], expected, atol=1e-6) == separate
    assert torch.allclose(model.norm.running_mean, twin.norm.running_mean) == separate
    assert model.norm.num_batches_tracked == twin.norm.num_batches_tracked == 1
    assert model.norm.track_running_stats


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"after": "block.1"}, r"no submodule 'block.1'.*'blocks.1'"),
        ({"after": "blocks"}, "'blocks' is never called"),
        ({"after": []}, "is empty"),
        ({"after": ["blocks.1", "blocks.1"]}, "names one submodule twice"),
        ({"after": "blocks.1", "before": "fc"}, "takes only one of before=, after=, blocks= and encoder_layers="),
        ({"blocks": [4]}, "there is no block 4"),
        ({"blocks": "last"}, "a list of numbers, such as .*, or .all."),
        ({"blocks": 2}, "a list of numbers"),
        ({"after": "blocks.1", "batch_norm": "none"}, "batch_norm='none'"),
        ({"after": "fc"}, r"\(2, 3\), which is not clearly tokens"),
        ({"after": "blocks.1", "heads": 3}, "dim=8 is not divisible by heads=3"),
    ],
)
def test_wrong_calls_say_what_to_do_and_leave_nothing(arguments: dict, says: str) -> None:
    model = Blocks()
    before = {name: sorted(module.__dict__) for name, module in model.named_modules()}
    with pytest.raises(UserError, match=says):
        bf.attach(model, **{"heads": 2, **arguments})
    assert {name: sorted(module.__dict__) for name, module in model.named_modules()} == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_attaching_twice_is_refused_with_the_side_it_is_on() -> None:
    model = Blocks()
    bf.attach(model, blocks=[1], heads=2)
    with pytest.raises(UserError, match=r"already attached after 'blocks.1'.*after=\["):
        bf.attach(model, blocks=[2], heads=2)


def test_blocks_of_a_model_without_them_are_asked_for_by_path() -> None:
    with pytest.raises(UserError, match=r"no blocks under a standard name.* layer3, layer4,"):
        bf.attach(timm.create_model("resnet18", num_classes=3), blocks=[0])


def test_one_line_of_blocks_for_a_vit() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=3)
    attachment = bf.attach(model, blocks="all", heads=3)
    assert [point.paths[0] for point in attachment.points] == [f"blocks.{k}" for k in range(12)]


def test_a_model_in_half_precision_is_attached_to_as_it_is() -> None:
    model = Blocks().bfloat16().train()
    attachment = bf.attach(model, blocks=[0, 2], heads=2)
    assert {p.dtype for p in attachment.parameters()} == {torch.bfloat16}
    assert model(tokens().bfloat16()).shape == (8, 3)


class Three(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(x))
        if len(x) > 3:
            raise RuntimeError("room for three")
        return self.fc(x.mean(1))


def test_a_model_that_does_not_take_more_rows_is_refused_with_what_it_said() -> None:
    with pytest.raises(UserError, match=r"does not pass .* from 'blocks.0' \(RuntimeError: room for three\): attach"):
        bf.attach(Three(), blocks=[0], heads=2)


def test_rectangular_maps_of_a_swin_need_no_word() -> None:
    sizes = {"img_size": (64, 128), "embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2), "window_size": 4}
    model = timm.models.SwinTransformer(patch_size=4, num_classes=3, **sizes).train()
    attachment = bf.attach(model, blocks="all", heads=2)
    assert [point.module.dim for point in attachment.points] == [16, 32]
    assert model(torch.randn(2, 3, 64, 128)).shape == (4, 3)


def test_after_a_forward_that_failed_parts_of_the_model_are_refused_as_before() -> None:
    model = timm.create_model("pvt_v2_b0", depths=(1, 1, 1, 1), num_classes=3).train()  # its stages note the batch size
    bf.attach(model, after="stages.1.blocks.0", heads=2)
    x = torch.randn(2, 3, 32, 32)
    with pytest.raises(RuntimeError, match="channels"):
        model(x[:, :2])
    with pytest.raises(UserError, match="cannot be called on its own"):
        model.forward_features(x)
    assert model(x).shape == (4, 3)


class Flattened(nn.Module):
    """A small network as in many a tutorial: what the convolutions give is flattened by `.view`."""

    def __init__(self, convolution: nn.Module, pixels: int) -> None:
        super().__init__()
        self.features, self.scores = convolution, nn.Linear(8 * pixels, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.features(x).view(-1, self.scores.in_features))


@pytest.mark.parametrize("streams", ["duplicate", "split", "single"])
@pytest.mark.parametrize(
    ("convolution", "shape"),
    [(nn.Conv2d(3, 8, 3, padding=1), (6, 3, 4, 4)), (nn.Conv1d(3, 8, 3, padding=1), (6, 3, 9))],
)
def test_maps_and_signals_keep_their_layout_in_memory(convolution, shape, streams):
    model, x = Flattened(convolution, shape[2] * shape[-1] if len(shape) == 4 else shape[2]), torch.randn(shape)
    attachment = bf.attach(model, after=["features"], streams=streams, example_inputs=x)
    assert len(model.train()(x)) == (12 if streams == "duplicate" else 6)
    with attachment.infer_with_batch():
        assert len(model.eval()(x)) == 6


def test_maps_with_channels_last_stay_so():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()).to(memory_format=torch.channels_last)
    bf.attach(model, after=["0"], example_inputs=torch.randn(2, 3, 4, 4))
    out = model.train()(torch.randn(6, 3, 4, 4).to(memory_format=torch.channels_last))
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert not out.is_contiguous()
