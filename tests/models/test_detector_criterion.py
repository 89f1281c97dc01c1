"""Matching and losses of all decoder layers at once: what transformers gives for each, number for number, sooner."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.loss.loss_deformable_detr import DeformableDetrHungarianMatcher, DeformableDetrImageLoss
from transformers.loss.loss_for_object_detection import HungarianMatcher, ImageLoss

from batchformer.models.detector_criterion import decoder_losses, match_layers
from batchformer.models.detector_loss import detection_loss

CLASSES, QUERIES = 15, 16  # with 4 images: whole vectors of the CPU, whose ends it rounds otherwise
COSTS = (1.0, 5.0, 2.0)
LOSSES = ["labels", "boxes", "cardinality"]
KINDS = {
    "softmax": lambda: ImageLoss(HungarianMatcher(*COSTS), CLASSES, 0.1, LOSSES),
    "focal": lambda: DeformableDetrImageLoss(DeformableDetrHungarianMatcher(*COSTS), CLASSES + 1, 0.25, LOSSES),
}
WEIGHTS = {"loss_ce": 2.0, "loss_bbox": 5.0, "loss_giou": 2.0}
OBJECTS = {"some": (3, 0, 5, 1), "more than queries": (20, 2, 0, 17), "none": (0, 0, 0, 0)}


def outputs(layers, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(layers, 4, QUERIES, CLASSES + 1, generator=generator)
    boxes = torch.randn(layers, 4, QUERIES, 4, generator=generator).sigmoid()
    return logits.requires_grad_(), boxes.requires_grad_()


def labels_of(counts):
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "class_labels": torch.randint(0, CLASSES, (count,), generator=generator),
            "boxes": torch.rand(count, 4, generator=generator) / 2 + 0.1,
        }
        for count in counts
    ]


def by_layers(criterion, logits, boxes, labels):
    """As transformers does it: the last layer first, then each of the others."""
    number = max(1.0, float(sum(len(one["boxes"]) for one in labels)))
    loss, parts = 0, {}
    for layer, ending in ((len(logits) - 1, ""), *((k, f"_{k}") for k in range(len(logits) - 1))):
        predictions = {"logits": logits[layer], "pred_boxes": boxes[layer]}
        indices = criterion.matcher(predictions, labels)
        found = {}
        for name in criterion.losses:
            found |= criterion.get_loss(name, predictions, labels, indices, number)
        loss = loss + sum(weight * found[name] for name, weight in WEIGHTS.items())
        parts |= {f"{name}{ending}": value for name, value in found.items()}
    return loss, parts


@pytest.mark.parametrize("counts", OBJECTS.values(), ids=OBJECTS)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_each_layer_by_itself(kind, counts):
    criterion, labels = KINDS[kind](), labels_of(counts)
    logits, boxes = outputs(3)
    wanted, wanted_parts = by_layers(criterion, logits, boxes, labels)
    wanted_gradients = torch.autograd.grad(wanted, (logits, boxes))
    last = {"logits": logits[-1], "pred_boxes": boxes[-1]}
    loss, parts, earlier = decoder_losses(criterion, last, logits, boxes, labels, WEIGHTS)
    assert parts.keys() == wanted_parts.keys()
    assert all(torch.equal(parts[name], value) for name, value in wanted_parts.items())
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    gradients = torch.autograd.grad(loss, (logits, boxes))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, wanted_gradients, strict=True))
    assert [torch.equal(one["logits"], logits[k]) for k, one in enumerate(earlier)] == [True, True]


@pytest.mark.parametrize("counts", OBJECTS.values(), ids=OBJECTS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_is_matched_as_by_itself(kind, counts):
    matcher, labels = KINDS[kind]().matcher, labels_of(counts)
    logits, boxes = (each.detach() for each in outputs(3, seed=2))
    matches = match_layers(matcher, logits, boxes, labels)
    for layer in range(3):
        wanted = matcher({"logits": logits[layer], "pred_boxes": boxes[layer]}, labels)
        for found, expected in zip(matches.of_layer(layer), wanted, strict=True):
            assert [each.tolist() for each in found] == [each.tolist() for each in expected]
    assert matches.layer.tolist() == sorted(matches.layer.tolist())
    assert len(matches.layer) == 3 * sum(min(count, QUERIES) for count in counts)


class Counted(TorchDispatchMode):
    """How many operations ran, and how many of them a device would be waited for."""

    def __init__(self):
        super().__init__()
        self.operations = self.waits = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.operations += 1
        self.waits += operation._overloadpacket in (
            torch.ops.aten._local_scalar_dense, torch.ops.aten.is_nonzero, torch.ops.aten.nonzero,
        )  # fmt: skip
        return operation(*args, **kwargs or {})


@pytest.mark.parametrize("kind", KINDS)
def test_more_layers_are_little_more_work_for_the_host_and_nothing_waits(kind):
    criterion, labels, counted = KINDS[kind](), labels_of(OBJECTS["some"]), []
    for layers in (1, 6):
        logits, boxes = outputs(layers)
        with Counted() as count:
            last = {"logits": logits[-1], "pred_boxes": boxes[-1]}
            decoder_losses(criterion, last, logits, boxes, labels, WEIGHTS)[0].backward()
        assert count.waits == 0
        counted.append(count.operations)
    assert counted[1] < 2 * counted[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [float("nan"), -0.5])
def test_what_is_no_box_is_told(kind, wrong):
    logits, boxes = (each.detach() for each in outputs(2))
    boxes[0, 1, 2, 2] = wrong
    with pytest.raises(ValueError, match="boxes"):
        match_layers(KINDS[kind]().matcher, logits, boxes, labels_of(OBJECTS["some"]))


def test_a_loss_first_asked_for_by_a_validation_trains():
    config = SimpleNamespace(class_cost=1.5, bbox_cost=5.0, giou_cost=2.0, num_labels=CLASSES, eos_coefficient=0.1,
                             bbox_loss_coefficient=5.0, giou_loss_coefficient=2.0, auxiliary_loss=False)  # fmt: skip
    (logits, boxes), labels = outputs(1), labels_of(OBJECTS["some"])
    with torch.inference_mode():
        seen, *_ = detection_loss(logits[0], labels, logits.device, boxes[0], config)
    loss, *_ = detection_loss(logits[0], labels, logits.device, boxes[0], config)
    loss.backward()
    assert torch.equal(loss, seen)
    assert logits.grad.any()
