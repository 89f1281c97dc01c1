"""Two-stage Deformable DETR: what chooses the proposals is trained, by the loss of the released code."""

import copy
import pickle

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from transformers import DeformableDetrConfig, DeformableDetrForObjectDetection

import batchformer as bf
from batchformer.errors import UserError
from batchformer.models import TwoStageDeformableDetr, create_detector
from batchformer.models.detector_loss import focal_detection_loss, proposal_loss

SMALL = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 8,
         "decoder_attention_heads": 2, "decoder_ffn_dim": 8, "num_queries": 6, "two_stage_num_proposals": 6,
         "dropout": 0.0, "image_size": 64}  # fmt: skip
WEIGHTS = {"loss_ce": 2, "loss_bbox": 5, "loss_giou": 2}  # in the loss and in the matching, as published


@pytest.fixture(scope="module")
def detector():
    torch.manual_seed(0)
    model = create_detector("deformable-detr-two-stage", num_labels=3, backbone="test_resnet", **SMALL).train()
    for head in model.bbox_embed:  # which begin at zero
        torch.nn.init.normal_(head.layers[-1].weight, std=0.1)
    return model


def batch(counts=(2, 0, 3)):
    """The second image has no object, the last one is narrower than the canvas."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(len(counts), 64, 96, dtype=torch.long)
    mask[-1, :, 48:] = 0
    labels = [
        {
            "class_labels": torch.randint(3, (count,), generator=generator),
            "boxes": torch.rand(count, 4, generator=generator) * 0.3 + 0.3,
        }
        for count in counts
    ]
    pixels = torch.randn(len(counts), 3, 64, 96, generator=generator)
    return {"pixel_values": pixels, "pixel_mask": mask, "labels": labels}


# ---- the slow, obvious version


def overlap(found, wanted):
    """Generalised intersection over union of two boxes given by centre and size."""
    left, top, right, bottom = (
        (a - b / 2, a + b / 2)[k] for k in (0, 1) for a, b in zip(found[:2], found[2:], strict=True)
    )
    low, high = wanted[:2] - wanted[2:] / 2, wanted[:2] + wanted[2:] / 2
    inside = (torch.min(right, high[0]) - torch.max(left, low[0])).clamp(min=0) * (
        torch.min(bottom, high[1]) - torch.max(top, low[1])
    ).clamp(min=0)
    union = found[2] * found[3] + wanted[2] * wanted[3] - inside
    hull = (torch.max(right, high[0]) - torch.min(left, low[0])) * (torch.max(bottom, high[1]) - torch.min(top, low[1]))
    return inside / union - (hull - union) / hull


def focal(probability, is_object):
    """Of one logit's sigmoid; in the loss and, as the difference of both cases, in the matching."""
    if is_object:
        return -0.25 * (1 - probability) ** 2 * probability.log()
    return -0.75 * probability**2 * (1 - probability).log()


def slow_loss(logits, labels, box_logits):
    """Image by image, cell by cell: objects of all classes are objects, and an object is class 0."""
    parts = dict.fromkeys(WEIGHTS, torch.zeros((), dtype=logits.dtype))
    for scores, cells, label in zip(logits.sigmoid(), box_logits.sigmoid(), labels, strict=True):
        costs = [
            [
                float(
                    2 * (focal(score[0], True) - focal(score[0], False))
                    + 5 * (cell - box).abs().sum()
                    - 2 * overlap(cell, box)
                )
                for box in label["boxes"]
            ]
            for score, cell in zip(scores.detach(), cells.detach(), strict=True)
        ]
        pairs = zip(*linear_sum_assignment(costs), strict=True) if len(label["boxes"]) else []
        of_cell = dict(pairs)
        for number, score in enumerate(scores):
            for k, probability in enumerate(score):
                parts["loss_ce"] = parts["loss_ce"] + focal(probability, k == 0 and number in of_cell)
        for number, which in of_cell.items():
            box = label["boxes"][which]
            parts["loss_bbox"] = parts["loss_bbox"] + (cells[number] - box).abs().sum()
            parts["loss_giou"] = parts["loss_giou"] + 1 - overlap(cells[number], box)
    boxes = max(1, sum(len(label["boxes"]) for label in labels))
    parts = {name: value / boxes for name, value in parts.items()}
    return sum(weight * parts[name] for name, weight in WEIGHTS.items()), parts


@pytest.mark.parametrize("counts", [(2, 0, 3), (0, 0)], ids=["objects", "nothing"])
def test_value_and_gradient_are_those_of_the_slow_version(counts, detector):
    labels = batch(counts)["labels"]
    logits = torch.randn(len(counts), 9, 3, dtype=torch.float64).requires_grad_()
    box_logits = torch.randn(len(counts), 9, 4, dtype=torch.float64)
    box_logits[:, 4] = torch.inf  # as transformers marks padding
    box_logits.requires_grad_()
    labels = [{name: value.double() if name == "boxes" else value for name, value in one.items()} for one in labels]
    found, parts = proposal_loss(logits, labels, box_logits, detector.config)
    wanted, wanted_parts = slow_loss(logits, labels, box_logits)
    torch.testing.assert_close(found, wanted)
    for name, value in wanted_parts.items():
        torch.testing.assert_close(parts[f"{name}_enc"], value)
    gradients = [torch.autograd.grad(loss, [logits, box_logits], materialize_grads=True) for loss in (found, wanted)]
    torch.testing.assert_close(*gradients, equal_nan=False)


# ---- in the model


def parts_of_the_choice(model):
    base = model.model
    return [
        base.enc_output.weight,
        base.enc_output_norm.weight,
        base.decoder.class_embed[-1].weight,
        base.decoder.bbox_embed[-1].layers[0].weight,
        base.decoder.bbox_embed[-1].layers[-1].bias,
    ]


def check_total(model, outputs, decoders_loss, proposals_losses):
    """The loss is the decoder's and the mean of the proposals', and these alone move what chooses the proposals."""
    expected = torch.stack(proposals_losses).mean()
    torch.testing.assert_close(outputs.loss, decoders_loss + expected, rtol=1e-4, atol=1e-4)
    chosen_by = parts_of_the_choice(model)
    assert all(p.requires_grad for p in chosen_by)
    found, wanted = (torch.autograd.grad(loss, chosen_by, retain_graph=True) for loss in (outputs.loss, expected))
    for one, other in zip(found, wanted, strict=True):
        assert one.abs().max() > 1e-5
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_the_model_adds_the_loss_of_its_proposals_to_that_of_transformers(detector):
    inputs = batch()
    outputs = detector(**inputs)
    stock = DeformableDetrForObjectDetection(detector.config).train()
    stock.load_state_dict(detector.state_dict())
    decoders = stock(**inputs)
    torch.testing.assert_close(decoders.logits, outputs.logits)
    classes = sum(part for name, part in decoders.loss_dict.items() if name.startswith("loss_ce"))
    proposals = slow_loss(outputs.enc_outputs_class, inputs["labels"], outputs.enc_outputs_coord_logits)[0]
    check_total(detector, outputs, decoders.loss + classes, [proposals])  # transformers' class weight is 1, not 2


def test_with_the_module_the_proposals_of_each_stream_have_their_loss(detector):
    model, inputs = copy.deepcopy(detector), batch()
    attachment = bf.attach(model, encoder_layers=[0], dropout=0.0)
    outputs = model(**inputs)
    plain, related = attachment.stream_losses()
    torch.testing.assert_close(plain, detector(**inputs).loss)
    torch.testing.assert_close(outputs.loss, (plain + related) / 2)
    classes, cells = outputs.enc_outputs_class, outputs.enc_outputs_coord_logits
    assert not torch.allclose(classes[:3], classes[3:], atol=1e-3)
    proposals = [slow_loss(classes[rows], inputs["labels"], cells[rows])[0] for rows in (slice(3), slice(3, 6))]
    layers = [*outputs.auxiliary_outputs, {"logits": outputs.logits, "pred_boxes": outputs.pred_boxes}]
    every = [torch.stack([layer[name] for layer in layers]) for name in ("logits", "pred_boxes")]
    decoders = focal_detection_loss(
        outputs.logits, 2 * inputs["labels"], "cpu", outputs.pred_boxes, model.config, *every
    )
    check_total(model, outputs, decoders[0], proposals)
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(**inputs).loss, outputs.loss)
    torch.testing.assert_close(copy.deepcopy(model)(**inputs).loss, outputs.loss)
    attachment.detach()
    assert torch.equal(model(**inputs).loss, detector(**inputs).loss)
    assert "proposal_loss" not in model.__dict__


def test_without_any_object_both_streams_still_make_a_mean(detector):
    model, inputs = copy.deepcopy(detector), batch((0, 0))
    attachment = bf.attach(model, encoder_layers=[0], norm="pre", dropout=0.0)
    for name, parameter in attachment.named_parameters():
        if "out_proj" in name or "linear2" in name:
            torch.nn.init.zeros_(parameter)
    torch.testing.assert_close(model(**inputs).loss, detector(**inputs).loss)


def test_files_go_to_transformers_and_come_back(detector, tmp_path):
    inputs = batch()
    detector.save_pretrained(tmp_path)
    stock, problems = DeformableDetrForObjectDetection.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(problems.values())
    again, problems = TwoStageDeformableDetr.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(problems.values())
    expected = detector(**inputs)
    assert torch.equal(stock.train()(**inputs).logits, expected.logits)
    assert torch.equal(again.train()(**inputs).loss, expected.loss)
    assert torch.equal(again(**inputs, return_dict=False)[0], expected.loss)


def test_a_configuration_of_one_stage_is_refused():
    with pytest.raises(UserError, match="is for configurations with two_stage=True"):
        TwoStageDeformableDetr(DeformableDetrConfig(backbone="test_resnet"))
