"""Detectors by the names of the papers: the stock classes, begun and grouped as their authors do."""

import copy
import math

import pytest
import timm
import torch
from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING

from batchformer.errors import UserError
from batchformer.models import DETECTORS, create_detector, parameter_groups
from batchformer.models.detector_backbone import restore_activations
from batchformer.models.detector_loss import detection_loss, focal_detection_loss, segmentation_loss

SMALL = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 2, "encoder_ffn_dim": 8,
         "decoder_attention_heads": 2, "decoder_ffn_dim": 8, "num_queries": 6, "dropout": 0.0}  # fmt: skip
FOCAL = [name for name in DETECTORS if name != "detr"]


def build(name="detr", backbone="test_resnet", **more):
    if name == "deformable-detr-two-stage":
        more = {"two_stage_num_proposals": 6, **more}
    torch.manual_seed(0)
    return create_detector(name, num_labels=3, backbone=backbone, **{**SMALL, **more})


@pytest.fixture(scope="module")
def detectors():
    return {name: build(name) for name in DETECTORS}


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(0)
    labels = [
        {"class_labels": torch.tensor([0, 2]), "boxes": torch.rand(2, 4, generator=generator) * 0.3 + 0.3},
        {"class_labels": torch.zeros(0, dtype=torch.long), "boxes": torch.zeros(0, 4)},
    ]
    return {"pixel_values": torch.randn(2, 3, 64, 64, generator=generator), "labels": labels}


@pytest.mark.parametrize("name", DETECTORS)
def test_class_counts_as_published_in_the_loss(name, detectors, batch):
    """Each layer's class loss twice, where transformers takes it once; plain DETR as it is there."""
    model = detectors[name].train()
    published = model(**batch)
    own = type(model)(model.config)
    own.load_state_dict(model.state_dict())
    two_stage = name == "deformable-detr-two-stage"  # see test_two_stage_detr.py
    if name != "smca-detr" and not two_stage:
        restore_activations(own.model.backbone.model, "test_resnet")
        stock = own.train()(**batch).loss
        classes = sum(part for key, part in published.loss_dict.items() if key.startswith("loss_ce"))
        torch.testing.assert_close(published.loss, stock + (name in FOCAL) * classes)
    assert sum(key.startswith("loss_ce") for key in published.loss_dict) == 3 + two_stage  # auxiliary losses are on


@pytest.mark.parametrize("objects", [(2, 0, 3), (0, 0, 0)], ids=["objects", "nothing"])
@pytest.mark.parametrize("kind", ["ForObjectDetection", "ForSegmentation", "DeformableDetrForObjectDetection"])
def test_in_one_process_losses_and_their_parts_are_those_of_transformers(kind, objects, detectors):
    name = "deformable-detr" if kind.startswith("Deformable") else "detr"
    config = copy.deepcopy(detectors[name].config)
    config.cls_loss_coefficient = 1  # the one published difference
    ours = {"ForObjectDetection": detection_loss, "ForSegmentation": segmentation_loss}.get(kind, focal_detection_loss)
    labels = [
        {
            "class_labels": torch.randint(3, (count,)),
            "boxes": torch.rand(count, 4) * 0.3 + 0.3,
            "masks": torch.rand(count, 16, 16).round(),
        }
        for count in objects
    ]
    classes, boxes = torch.randn(3, 3, 6, 4 - (name != "detr")), torch.rand(3, 3, 6, 4) * 0.3 + 0.3  # of three layers
    masks = [torch.randn(3, 6, 8, 8)] if kind == "ForSegmentation" else []
    given = classes[-1], labels, torch.device("cpu"), boxes[-1], *masks, config, classes, boxes
    found, wanted = ours(*given), LOSS_MAPPING[kind](*given)
    torch.testing.assert_close(found[:2], wanted[:2])
    assert [layer.keys() for layer in found[2]] == [layer.keys() for layer in wanted[2]]


@pytest.mark.parametrize("name", ["detr", "deformable-detr", "smca-detr"])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_losses_of_half_precision_outputs_are_those_in_full(name, half, detectors):
    """Two sure queries, each on its object: with float16 the logarithms of their costs would overflow."""
    model = detectors[name]
    boxes = torch.tensor([[0.3, 0.3, 0.2, 0.2], [0.7, 0.7, 0.2, 0.2], [0.5, 0.5, 0.2, 0.2]], dtype=half)[None]
    logits = torch.full((1, 3, 4 if name == "detr" else 3), -20.0, dtype=half)
    logits[0, 0, 1] = logits[0, 1, 2] = 20.0
    labels = [{"class_labels": torch.tensor([1, 2]), "boxes": boxes[0, :2].float()}]

    def loss(logits, boxes, **layers):
        return model.loss_function(logits, labels, torch.device("cpu"), boxes, model.config, **layers)[1]

    def layers(logits, boxes):
        return {"outputs_class": logits.expand(3, -1, -1, -1), "outputs_coord": boxes.expand(3, -1, -1, -1)}

    with torch.autocast("cpu", dtype=half):
        found = loss(logits, boxes, **layers(logits, boxes))
    wanted = loss(logits.float(), boxes.float(), **layers(logits.float(), boxes.float()))
    assert {key: value.dtype for key, value in found.items() if key.startswith("loss")} == {
        key: torch.float32 for key in wanted if key.startswith("loss")
    }
    torch.testing.assert_close(found, wanted)
    assert found["loss_bbox"] < 1e-6  # each object with the query that is sure of it


@pytest.mark.parametrize("name", FOCAL)
def test_a_focal_detector_begins_with_rare_objects_and_boxes_at_their_references(name, detectors, batch):
    with torch.no_grad():
        out = detectors[name].eval()(batch["pixel_values"])
    assert 0.003 < out.logits.sigmoid().mean() < 0.03
    sizes = out.pred_boxes[..., 2:]
    expected = 1 / (1 + math.exp(2)) if name in ("deformable-detr", "deformable-detr-refine") else None
    if expected is not None:
        torch.testing.assert_close(sizes, torch.full_like(sizes, expected))


def test_attention_and_queries_begin_as_in_the_released_code():
    wide = create_detector("detr", num_labels=3, backbone="test_resnet", encoder_layers=1, decoder_layers=1)
    matrix = wide.model.encoder.layers[0].mlp.fc1.weight
    assert matrix.std().item() == pytest.approx(math.sqrt(2 / sum(matrix.shape)), rel=0.02)  # Xavier
    assert wide.model.query_position_embeddings.weight.std().item() == pytest.approx(1, rel=0.05)


def test_what_transformers_begins_as_published_is_kept(detectors):
    attention = detectors["deformable-detr"].model.encoder.layers[0].self_attn
    assert attention.sampling_offsets.weight.count_nonzero() == 0
    assert attention.sampling_offsets.bias.abs().max() == attention.n_points
    assert attention.attention_weights.weight.count_nonzero() == 0


@pytest.mark.parametrize("name", DETECTORS)
def test_every_trained_parameter_gets_a_gradient_without_any_object_too(name, detectors, batch):
    """As DDP wants it from each process in each step."""
    model = detectors[name].train()
    model.zero_grad()
    nothing = batch["labels"][1]
    model(batch["pixel_values"], labels=[nothing, nothing]).loss.backward()
    assert not [key for key, value in model.named_parameters() if value.requires_grad and value.grad is None]


def test_groups_hold_every_trained_parameter_once(detectors):
    for name, model in detectors.items():
        groups = parameter_groups(model, 1e-4, 1e-5, 1e-6, 1e-4)
        held = [id(parameter) for group in groups for parameter in group["params"]]
        assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)
        assert {group["name"] for group in groups} >= {"rest", "backbone"}
        assert ("sampling" in {group["name"] for group in groups}) == name.startswith("deformable")
    (sampling,) = (
        group for group in parameter_groups(detectors["deformable-detr"], 2, 1, 0.2, 0) if group["lr"] == 0.2
    )
    own = detectors["deformable-detr"].model
    assert own.reference_points.weight in set(sampling["params"])
    assert own.decoder.layers[0].encoder_attn.sampling_offsets.bias in set(sampling["params"])


def test_backbone_keeps_its_activations(batch):
    """transformers' frozen BatchNorm swallows those that timm computes in the same module."""
    body = build(backbone="test_efficientnet").model.backbone.model
    stock = timm.create_model("test_efficientnet", features_only=True).eval()
    state = {key: value for key, value in body.state_dict().items() if key in stock.state_dict()}
    stock.load_state_dict({**stock.state_dict(), **state})
    with torch.no_grad():
        torch.testing.assert_close(body(batch["pixel_values"])[-1], stock(batch["pixel_values"])[-1])


@pytest.fixture(scope="module")
def mobilenet(tmp_path_factory):
    """torchvision's MobileNetV2 with moved statistics, and its file."""
    import torchvision

    torch.manual_seed(0)
    net = torchvision.models.mobilenet_v2()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    file = tmp_path_factory.mktemp("weights") / "mobilenet_v2.pth"
    torch.save(net.state_dict(), file)
    return net.eval(), str(file)


def test_torchvisions_mobilenet_file_gives_torchvisions_features(mobilenet, batch):
    stock, file = mobilenet
    model = build(backbone="mobilenetv2_100", backbone_weights=file)
    with torch.no_grad():
        expected = stock.features[:18](batch["pixel_values"])
        torch.testing.assert_close(model.model.backbone.model(batch["pixel_values"])[-1], expected)


def test_a_file_of_another_network_is_refused(mobilenet, tmp_path):
    with pytest.raises(UserError, match=r"does not hold the weights of test_resnet.*is missing|are missing"):
        build(backbone_weights=mobilenet[1])
    with pytest.raises(UserError, match="there is no file"):
        build(backbone_weights="nowhere.pth")
    (tmp_path / "page.pth").write_text("<html>not found</html>")
    with pytest.raises(UserError, match="no file of weights") as told:
        build(backbone_weights=str(tmp_path / "page.pth"))
    assert "weights_only" not in str(told.value)  # torch's advice to load it all the same
    wide = timm.create_model("test_resnet", num_classes=7).state_dict()
    wide["conv1.0.weight"] = torch.zeros(1, 3, 3, 3)
    torch.save({"state_dict": wide}, tmp_path / "wide.pth")
    with pytest.raises(UserError, match=r"conv1.0.weight has the shape \(1, 3, 3, 3\)"):
        build(backbone_weights=str(tmp_path / "wide.pth"))


@pytest.mark.parametrize(("frozen", "trained"), [(0, True), (2, True), ("all", False)])
def test_frozen_stages_get_no_gradient(frozen, trained):
    body = build(frozen_stages=frozen).model.backbone.model
    assert any(p.requires_grad for p in body.parameters()) == trained
    if frozen == 2:
        assert not any(p.requires_grad for name in ("conv1", "layer1") for p in getattr(body, name).parameters())
        assert all(p.requires_grad for name in ("layer2", "layer3", "layer4") for p in getattr(body, name).parameters())


def test_weights_freeze_stem_and_first_stage_as_published(mobilenet):
    body = build(backbone="mobilenetv2_100", backbone_weights=mobilenet[1]).model.backbone.model
    assert not body.conv_stem.weight.requires_grad
    assert not any(p.requires_grad for p in body.blocks[1].parameters())
    assert all(p.requires_grad for p in body.blocks[2].parameters())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({"name": "dtr"}, "there is no detector 'dtr': there are detr"),
        ({"num_querys": 5}, "DetrConfig has no 'num_querys'"),
        ({"num_queries": 0}, "^detr with these settings: num_queries=0 must be at least 1"),
        ({"encoder_layers": "two"}, "'encoder_layers' expected int, got str"),
        ({"d_model": 30}, "d_model=30 must divide by 4 and by encoder_attention_heads=2"),
        ({"d_model": 36, "decoder_attention_heads": 8}, "by decoder_attention_heads=8"),
        ({"frozen_stages": 9}, "between 0 and 5"),
        ({"backbone": "resnet5000"}, "resnet5000"),
        (
            {"name": "deformable-detr", "d_model": 20, "encoder_attention_heads": 5},
            "deformable-detr with these settings",
        ),
    ],
)
def test_mistakes_are_told(call, said):
    with pytest.raises(UserError, match=said):
        build(**call)
