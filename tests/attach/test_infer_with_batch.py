"""`infer_with_batch` against the computation by hand; `related` beside `plain`; partial forwards that are refused."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn

import batchformer as bf
from batchformer.errors import UserError

from .small_models import Blocks, tokens


def vit(**arguments) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=24, num_classes=5, **arguments)
    nn.init.normal_(model.head.weight)  # timm starts it at zero
    return model.eval()


def images(count: int = 3, size: int = 32) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def test_every_module_inside_relates_the_batch_in_one_stream_without_dropout() -> None:
    model, x = vit(), images()
    attachment = bf.attach(model, blocks="all", heads=3)  # dropout .5 in training
    with torch.no_grad():
        t = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x))))
        for block, point in zip(model.blocks, attachment.points, strict=True):
            t = point.module.relate(block(t))
        expected = model.forward_head(model.norm(t))
        with attachment.infer_with_batch():
            outputs = model(x)
    torch.testing.assert_close(outputs, expected)
    assert not torch.allclose(outputs, model(x), atol=1e-3)


def test_the_module_before_the_classifier_relates_the_batch_too() -> None:
    model, x = timm.create_model("resnet10t", num_classes=5).eval(), images()
    attachment = bf.attach(model)
    with torch.no_grad(), attachment.infer_with_batch():
        outputs = model(x)
    features = model.forward_head(model.forward_features(x), pre_logits=True)
    torch.testing.assert_close(outputs, model.fc(attachment.points[0].module.relate(features)))


def test_maps_are_related_at_every_pixel() -> None:
    model, x = timm.create_model("resnet10t", num_classes=5).eval(), images()
    attachment = bf.attach(model, after="layer3")
    with torch.no_grad(), attachment.infer_with_batch():
        outputs = model(x)
    t = model.layer3(model.layer2(model.layer1(model.maxpool(model.act1(model.bn1(model.conv1(x)))))))
    t = attachment.points[0].module.relate(t.movedim(1, -1)).movedim(-1, 1)
    torch.testing.assert_close(outputs, model.forward_head(model.layer4(t)))


def test_a_model_with_doubled_input_runs_one_stream() -> None:
    model, x = Blocks(captures=True).eval(), tokens()
    attachment = bf.attach(model, blocks=[1], heads=2)
    with torch.no_grad(), attachment.infer_with_batch():
        outputs = model(x)
    t = attachment.points[0].module.relate(model.blocks[1](model.blocks[0](model.embed(x))))
    t = model.blocks[3](model.blocks[2](t))
    torch.testing.assert_close(outputs, model.fc(torch.cat([torch.zeros(4, 1, 8), t], dim=1).mean(1)))


def test_an_image_is_answered_by_its_batch_inside_and_alone_outside() -> None:
    model, x = vit(), images()
    attachment = bf.attach(model, blocks=[0], heads=3)
    other = torch.cat([x[:1], x[1:] + 1.0])
    with torch.no_grad():
        before = model(x)
        with attachment.infer_with_batch() as same:
            assert same is model
            assert not torch.allclose(model(x)[0], model(other)[0], atol=1e-4)
        assert torch.equal(model(x), before)
        assert torch.equal(model(other)[0], before[0])


def test_training_and_disabled_are_what_they_are_outside() -> None:
    model, x = Blocks(), tokens()
    attachment = bf.attach(model, blocks=[1], heads=2, dropout=0.0)
    expected, plain = model.train()(x), model.eval()(x)
    with attachment.infer_with_batch():
        torch.testing.assert_close(model.train()(x), expected)
        with attachment.disabled():
            assert torch.equal(model.eval()(x), plain)


@pytest.mark.traced
def test_compiled_code_notices() -> None:
    model, x = Blocks().eval(), tokens()
    attachment = bf.attach(model, blocks=[1], heads=2)
    fast = torch.compile(model, backend="eager")
    plain = fast(x)
    with attachment.infer_with_batch():
        torch.testing.assert_close(fast(x), model(x))
        assert not torch.allclose(fast(x), plain, atol=1e-4)
    assert torch.equal(fast(x), plain)


@pytest.mark.parametrize(("streams", "plain", "related"), [("duplicate", 4, 4), ("split", 2, 2), ("single", 4, 4)])
def test_plain_and_related_rows_of_each_kind_of_streams(streams: str, plain: int, related: int) -> None:
    model, x = Blocks().train(), tokens()
    attachment = bf.attach(model, blocks=[1], streams=streams, heads=2)
    outputs = {"logits": model(x), "loss": torch.tensor(0.0)}
    assert len(attachment.plain(outputs)["logits"]) == plain
    assert torch.equal(attachment.related(outputs)["logits"], outputs["logits"][-related:])


def test_there_are_no_related_rows_in_eval_when_disabled_of_one_split_image_and_after_detach() -> None:
    model = Blocks().eval()
    attachment = bf.attach(model, blocks=[1], streams="split", heads=2)
    assert attachment.related(model(tokens())) is None
    with attachment.infer_with_batch():
        outputs = model(tokens())
        assert attachment.related(outputs) is outputs
    assert attachment.related(model.train()(tokens(1))) is None
    with attachment.disabled():
        assert attachment.related(model(tokens())) is None
    attachment.detach()
    assert attachment.related(model(tokens())) is None


def test_the_weights_without_the_modules_load_into_a_fresh_model() -> None:
    model = Blocks()
    attachment = bf.attach(model, blocks=[1], heads=2)
    Blocks().load_state_dict(attachment.plain_state_dict(), strict=True)


def test_features_come_in_both_streams_and_intermediates_are_refused_in_training() -> None:
    model, x = vit().train(), images()
    attachment = bf.attach(model, blocks=[0], heads=3, dropout=0.0)
    torch.testing.assert_close(model.forward_head(model.forward_features(x)), model(x))
    with pytest.raises(UserError, match="forward_intermediates cannot be called on its own in training"):
        model.forward_intermediates(x)
    with attachment.disabled():
        assert len(model.forward_intermediates(x)[0]) == 3
    assert model.eval().forward_intermediates(x)[1][-1].shape == (3, 24, 2, 2)
    attachment.detach()
    assert "forward_intermediates" not in model.__dict__


def test_features_of_a_model_with_doubled_input_are_refused_by_themselves_in_training() -> None:
    model, x = timm.create_model("pvt_v2_b0", depths=(1, 1, 1, 1), num_classes=5).train(), images()
    bf.attach(model, after="stages.1.blocks.0", heads=2)
    assert len(model(x)) == 6
    with pytest.raises(UserError, match="forward_features cannot be called on its own in training"):
        model.forward_features(x)
    assert len(model.eval().forward_features(x)) == 3


def test_intermediates_before_the_classifier_are_those_of_the_plain_model() -> None:
    model, x = vit().train(), images()
    expected = model.forward_intermediates(x)[1]
    bf.attach(model, heads=3)
    for ours, theirs in zip(model.forward_intermediates(x)[1], expected, strict=True):
        assert torch.equal(ours, theirs)


def test_checkpointing_with_a_module_after_every_block_recomputes_the_same_drops() -> None:
    """Drop-path in the blocks and dropout in the modules: the gradients of one seed are those without checkpointing."""
    model, x = vit(drop_path_rate=0.3).train(), images(6)
    bf.attach(model, blocks="all", heads=3)
    gradients = []
    for on in (False, True):
        model.set_grad_checkpointing(on)
        model.zero_grad()
        torch.manual_seed(1)
        model(x).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(list(model.parameters()))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_data_parallel_is_refused_with_a_way_out() -> None:
    model = Blocks()
    bf.attach(model, blocks=[1], heads=2)
    replica = model._replicate_for_data_parallel()  # what nn.DataParallel does for each GPU but the first
    with pytest.raises(UserError, match=r"nn\.DataParallel.*torchrun"):
        replica(tokens())
