"""The mask head stands on a detector that stays what it is: weights, outputs, no dropout, no gradient."""

import contextlib

import pytest
import torch
import transformers

import batchformer as bf
from batchformer.errors import UserError
from batchformer.models.panoptic_head import (
    freeze_detector,
    head_parameters,
    load_detector,
    only_matched_masks,
    quiet_detector,
    read_pretrained,
    with_mask_head,
)
from batchformer.training.weights import read_weights
from tests.attach.small_detectors import BUILD, batch

GIVEN = batch("segmentation")
IMAGES = {key: GIVEN[key] for key in ("pixel_values", "pixel_mask")}


def attached_head(**config):
    network = with_mask_head(BUILD["detr"](**config))
    bf.attach(network, encoder_layers=[0], heads=4)
    return network


def test_the_head_is_around_the_very_detector_and_changes_nothing_it_says():
    detector = BUILD["detr"]().eval()
    with torch.no_grad():
        before = detector(**IMAGES)
        network = with_mask_head(detector).eval()
        after = network(**IMAGES)
    assert isinstance(network, transformers.DetrForSegmentation)
    assert network.detr is detector
    assert torch.equal(before.logits, after.logits)
    assert torch.equal(before.pred_boxes, after.pred_boxes)
    assert after.pred_masks.shape[:2] == after.logits.shape[:2]


def test_only_the_head_gets_gradients_from_both_streams():
    network = attached_head(auxiliary_loss=False)
    freeze_detector(network)
    network.train()
    quiet_detector(network)
    out = network(**GIVEN)
    assert len(out.pred_masks) == 2 * len(IMAGES["pixel_values"])
    plain, related = out.pred_masks.chunk(2)
    assert not torch.allclose(plain, related)
    out.loss.backward()
    assert all(parameter.grad is not None for parameter in head_parameters(network))
    trained = {name.split(".")[0] for name, parameter in network.named_parameters() if parameter.grad is not None}
    assert trained == {"mask_head", "bbox_attention"}


def test_a_frozen_detector_draws_no_dropout():
    network = attached_head(dropout=0.5, attention_dropout=0.5)
    network.train()
    assert not torch.equal(network(**IMAGES).pred_masks, network(**IMAGES).pred_masks)
    quiet_detector(network)
    assert torch.equal(network(**IMAGES).pred_masks, network(**IMAGES).pred_masks)
    network.eval()
    quiet_detector(network)
    assert len(network(**IMAGES).logits) == len(IMAGES["pixel_values"])  # no second stream when evaluating


@pytest.fixture
def trained():
    """A detector with the module, its weights moved."""
    detector = BUILD["detr"]()
    bf.attach(detector, encoder_layers=[0], heads=4)
    with torch.no_grad():
        for parameter in detector.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return detector


def test_detector_and_module_come_from_the_first_stage(trained):
    network = attached_head()
    load_detector(network, trained.state_dict(), "runs/a", with_module=True)
    own = network.state_dict()
    for key, value in trained.state_dict().items():
        assert torch.equal(value, own[key if key.startswith("batchformer.") else f"detr.{key}"])
    plain = with_mask_head(BUILD["detr"]())
    load_detector(plain, trained.state_dict(), "runs/a", with_module=False)
    assert torch.equal(plain.detr.class_labels_classifier.bias, trained.class_labels_classifier.bias)


def test_what_does_not_fit_is_refused(trained):
    network = attached_head()
    with pytest.raises(UserError, match="trained without BatchFormerV2"):
        load_detector(network, BUILD["detr"]().state_dict(), "runs/a", with_module=True)
    with pytest.raises(UserError, match="has 9 categories and the data have 3"):
        load_detector(network, {**BUILD["detr"](num_labels=9).state_dict(), "batchformer.x": torch.ones(1)}, "a", True)
    with pytest.raises(UserError, match="another one than this recipe describes"):
        load_detector(network, {k: v for k, v in trained.state_dict().items() if "layers.1" not in k}, "a", True)
    with pytest.raises(UserError, match=r"another one .*batchformer\..* is only on one side"):
        load_detector(network, {k: v for k, v in trained.state_dict().items() if "linear1.bias" not in k}, "a", True)
    with pytest.raises(UserError, match="with a mask head already"):
        load_detector(network, network.state_dict(), "a", True)
    with pytest.raises(UserError, match="needs a DETR"):
        with_mask_head(BUILD["conditional"]())
    with pytest.raises(UserError, match="divide by 8"):
        with_mask_head(BUILD["detr"](encoder_attention_heads=4))


def test_a_detector_of_save_pretrained_is_read(tmp_path):
    detector = BUILD["detr"]()
    detector.save_pretrained(tmp_path)
    weights = read_pretrained(tmp_path)
    load_detector(network := with_mask_head(BUILD["detr"](dropout=0.1)), weights, "it", with_module=False)
    assert torch.equal(
        network.detr.model.encoder.layers[0].mlp.fc1.weight, detector.model.encoder.layers[0].mlp.fc1.weight
    )
    with pytest.raises(UserError, match="cannot read a DetrForObjectDetection"):
        read_pretrained(tmp_path / "nowhere")


def test_a_detector_of_a_run_is_read(tmp_path):
    detector, checkpoint = BUILD["detr"](), tmp_path / "checkpoints" / "last.ckpt"
    checkpoint.parent.mkdir()
    state = {f"net.{key}": value for key, value in detector.state_dict().items()}
    torch.save({"state_dict": {**state, "criterion.weight": torch.ones(1)}, "epoch": 3}, checkpoint)
    weights = read_weights(tmp_path)
    assert weights.keys() == detector.state_dict().keys()
    torch.save({"state_dict": {"net.a": torch.ones(1)}}, checkpoint.with_name("best.ckpt"))
    assert "a" not in read_weights(tmp_path)  # the best so far, of a run that goes on
    (tmp_path / "result.json").write_text("{}")
    assert list(read_weights(tmp_path)) == ["a"]
    checkpoint.with_name("best.ckpt").unlink()
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"last\.ckpt is damaged"):
        read_weights(tmp_path)


@pytest.mark.parametrize(("objects", "half"), [(True, False), (False, False), (True, True)])
def test_masks_of_matched_queries_alone_give_the_same_loss_and_gradients(objects, half):
    """Under autocast too, where both matchings have to be in full precision."""
    given = batch("segmentation", objects=objects)
    network = attached_head()
    network.train()
    quiet_detector(network)

    def learnt(context):
        network.zero_grad()
        with context, torch.autocast("cpu", torch.bfloat16, enabled=half):
            out = network(**given)
        out.loss.backward()
        return out, {name: parameter.grad for name, parameter in network.named_parameters()}

    whole, expected = learnt(contextlib.nullcontext())
    some, gradients = learnt(only_matched_masks(network, given["labels"]))
    torch.testing.assert_close(some.loss, whole.loss)
    for name, gradient in gradients.items():
        wanted = expected[name]
        torch.testing.assert_close(
            gradient, wanted, atol=1e-5, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )
    computed = (some.pred_masks != 0).flatten(2).any(-1)
    matched = 2 * sum(len(label["class_labels"]) for label in given["labels"])
    assert computed.sum() == (matched if objects else 1)
    torch.testing.assert_close(some.pred_masks[computed], whole.pred_masks[computed])
    assert "forward" not in network.mask_head.__dict__
