"""BatchFormerV2 in the encoder of transformers' detectors: the loss, the padding, and what the papers vary."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import batchformer as bf
from batchformer.errors import UserError

from ..selection import others_slow
from .small_detectors import BUILD, FOCAL, batch, layer

KINDS = list(BUILD)
MECHANISMS = others_slow(KINDS, ("detr", "deformable-two-stage", "segmentation"))


def trained_pair(kind: str, **keywords: Any) -> tuple[nn.Module, nn.Module, bf.Attachment]:
    """An attached detector without dropout and its plain twin, both in training mode."""
    model = BUILD[kind]().train()
    twin = copy.deepcopy(model)
    return model, twin, bf.attach(model, **{"encoder_layers": [0], "dropout": 0.0, **keywords})


@pytest.fixture(autouse=True)
def _one_thread_and_one_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.mark.parametrize("objects", [True, False], ids=["objects", "nothing"])
@pytest.mark.parametrize("kind", MECHANISMS)
def test_the_loss_is_the_mean_of_both_streams_each_with_the_models_own_loss(kind: str, objects: bool) -> None:
    model, twin, attachment = trained_pair(kind)
    inputs = batch(kind, objects=objects)
    outputs, expected = model(**inputs), twin(**inputs)
    plain, related = attachment.stream_losses()
    torch.testing.assert_close(plain, expected.loss)
    assert not torch.allclose(related, plain, atol=1e-4)
    torch.testing.assert_close(outputs.loss, (plain + related) / 2)
    # The related rows by themselves, given to the model's own criterion.
    rows = {name: attachment.related(outputs)[name] for name in ("logits", "pred_boxes")}
    masks = [attachment.related(outputs).pred_masks] if kind == "segmentation" else []
    auxiliary = [{name: part[name][2:] for name in part} for part in outputs.auxiliary_outputs]
    every = [torch.stack([*(part[name] for part in auxiliary), rows[name]]) for name in rows]
    loss, parts, _ = twin.loss_function(
        rows["logits"], inputs["labels"], torch.device("cpu"), rows["pred_boxes"], *masks, twin.config, *every
    )
    torch.testing.assert_close(related, loss)
    for name, value in parts.items():
        torch.testing.assert_close(outputs.loss_dict[name], (value + expected.loss_dict[name]) / 2)


@pytest.mark.parametrize("kind", MECHANISMS)
def test_with_objects_it_is_also_what_the_published_code_computes_from_doubled_targets(kind: str) -> None:
    model, twin, _ = trained_pair(kind)
    inputs = batch(kind)
    outputs = model(**inputs)
    masks = [outputs.pred_masks] if kind == "segmentation" else []
    every = [
        torch.stack([*(part[name] for part in outputs.auxiliary_outputs), outputs[name]])
        for name in ("logits", "pred_boxes")
    ]
    doubled = twin.loss_function(
        outputs.logits, 2 * inputs["labels"], torch.device("cpu"), outputs.pred_boxes, *masks, twin.config, *every
    )
    torch.testing.assert_close(outputs.loss, doubled[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", others_slow(FOCAL, ["deformable-two-stage"]))
def test_without_an_object_doubled_targets_alone_would_be_the_sum(kind: str) -> None:
    """Why each stream is normalised by itself: of an empty batch the number of boxes is taken as 1."""
    model, twin, _ = trained_pair(kind)
    inputs = batch(kind, objects=False)
    mean = model(**inputs).loss
    model.loss_function = twin.loss_function
    torch.testing.assert_close(model(**inputs).loss, 2 * mean, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", MECHANISMS)
def test_plain_rows_are_the_plain_model_and_the_backbone_sees_each_image_once(kind: str) -> None:
    model, twin, attachment = trained_pair(kind)
    inputs, rows = batch(kind), []
    core = model.get_submodule(layer(kind).rsplit(".encoder", 1)[0])
    for part in (core.backbone.model, core.encoder.layers[0].mlp.fc1, core.encoder.layers[1].mlp.fc1):
        part.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    outputs, expected = attachment.plain(model(**inputs)), twin(**inputs)
    assert rows == [2, 2, 4]
    for name, value in expected.items():
        if isinstance(value, Tensor) and value.ndim:
            torch.testing.assert_close(outputs[name], value, msg=lambda m, name=name: f"{name}: {m}")


def test_arguments_in_any_order_and_by_position_and_boxes_as_many_as_images_are_told_apart() -> None:
    model, _, _ = trained_pair("deformable")
    given = batch("deformable", count=2)
    expected = model(**given).loss
    assert torch.equal(model(**dict(reversed(given.items()))).loss, expected)
    assert torch.equal(model(given["pixel_values"], given["pixel_mask"], labels=given["labels"]).loss, expected)
    assert torch.equal(model(**{**given, "labels": 2 * given["labels"]}).loss, expected)  # repeated by hand
    as_tuple = model(**given, return_dict=False)
    assert torch.equal(as_tuple[0], expected)
    assert [len(one["boxes"]) for one in given["labels"]] == [2, 2]
    given["labels"][0] = {name: value[:1] for name, value in given["labels"][0].items()}
    assert torch.equal(model(**dict(reversed(given.items()))).loss, model(**given).loss)


@pytest.mark.parametrize("kind", ["detr", "deformable", "smca"])
@pytest.mark.parametrize("count", [1, 4])
def test_a_batch_of_one_and_one_as_large_as_the_feature_levels(kind: str, count: int) -> None:
    model, twin, attachment = trained_pair(kind)
    inputs = batch(kind, count)
    outputs = model(**inputs)
    assert len(outputs.logits) == 2 * count
    assert torch.allclose(attachment.stream_losses()[0], twin(**inputs).loss)
    model(**{**inputs, "labels": None})


@pytest.mark.parametrize("kind", MECHANISMS)
def test_eval_with_labels_and_padding_is_bit_identical(kind: str) -> None:
    model, twin, attachment = trained_pair(kind)
    inputs = batch(kind)
    with torch.no_grad():
        outputs, expected = model.eval()(**inputs), twin.eval()(**inputs)
    assert torch.equal(outputs.loss, expected.loss)
    assert torch.equal(outputs.logits, expected.logits)
    assert attachment.stream_losses() is None


GRIDS = {"deformable": [(8, 8), (16, 16), (32, 32), (64, 48)]}  # pixels between the cells of each feature map


@pytest.mark.parametrize("masked", [False, True], ids=["as published", "masked"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", others_slow(["detr", "conditional", "deformable", "smca"], ["detr", "deformable"]))
def test_each_cell_of_the_canvas_is_related_by_itself_with_or_without_its_padding(
    kind: str, attention: str, masked: bool
) -> None:
    model, _, attachment = trained_pair(kind, mask_padding=masked)
    if attention != "sdpa":  # the default
        model.set_attn_implementation(attention)
    inputs, seen = batch(kind, count=3), []
    model.model.encoder.layers[0].register_forward_hook(lambda _, args, out: seen.append(out))
    model(**inputs)
    plain, related = seen[0].chunk(2)
    grids = [inputs["pixel_mask"][:, ::down, ::across].flatten(1) for down, across in GRIDS.get(kind, [(32, 32)])]
    valid = torch.cat(grids, dim=1).bool()
    assert valid.shape == plain.shape[:2]
    assert 0 < (~valid).sum() < valid[1].numel()
    module = attachment.points[0].module
    torch.testing.assert_close(related, module.relate(plain, valid) if masked else module.relate(plain))
    assert torch.equal(related[~valid], plain[~valid]) == masked


def test_images_of_one_size_need_no_mask() -> None:
    model, _, attachment = trained_pair("detr", mask_padding=True)
    inputs = batch("detr")
    without = {name: value for name, value in inputs.items() if name != "pixel_mask"}
    expected = model(**without).logits
    inputs["pixel_mask"][:] = 1
    assert torch.equal(model(**inputs).logits, expected)
    attachment.detach()
    bf.attach(model, encoder_layers=[0], dropout=0.0).load_state_dict(attachment.state_dict())
    torch.testing.assert_close(model(**without).logits, expected)


@pytest.mark.parametrize("kind", ["detr", "deformable", "smca"])
def test_every_place_has_its_module_or_one_serves_all(kind: str) -> None:
    """Tables 3 and 4: any layers of the encoder, with one module each or one for all."""
    for share in (False, True):
        model, twin, attachment = trained_pair(kind, encoder_layers="all", share=share, mask_padding=True)
        assert attachment.paths == tuple(layer(kind, number) for number in range(2))
        assert len(attachment.modules) == (1 if share else 2)
        inputs, rows = batch(kind), []
        for one in model.model.encoder.layers:
            one.register_forward_hook(lambda _, args, out, rows=rows: rows.append(out))
        outputs = model(**inputs)
        assert [len(out) for out in rows] == [4, 4]
        torch.testing.assert_close(attachment.stream_losses()[0], twin(**inputs).loss)
        outputs.loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in attachment.parameters())


def test_a_later_layer_opens_the_streams_and_the_layers_before_it_see_each_image_once() -> None:
    model, twin, attachment = trained_pair("conditional", encoder_layers=[1])
    inputs, rows = batch(), []
    for one in model.model.encoder.layers:
        one.mlp.fc1.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    model(**inputs)
    assert rows == [2, 2]
    torch.testing.assert_close(attachment.stream_losses()[0], twin(**inputs).loss)


@pytest.mark.parametrize("kind", ["detr", "deformable-two-stage", "smca"])
def test_one_stream_only_is_the_papers_ablation(kind: str) -> None:
    """Table 11: all rows are related, none is plain, and the labels stay as they are."""
    model, twin, attachment = trained_pair(kind, streams="single")
    inputs = batch(kind, objects=False)
    outputs, expected = model(**inputs), twin(**inputs)
    assert outputs.logits.shape == expected.logits.shape
    assert not torch.allclose(outputs.logits, expected.logits, atol=1e-3)
    assert attachment.related(outputs) is not None
    loss = twin.loss_function(
        outputs.logits,
        inputs["labels"],
        torch.device("cpu"),
        outputs.pred_boxes,
        twin.config,
        *(
            torch.stack([*(part[name] for part in outputs.auxiliary_outputs), outputs[name]])
            for name in ("logits", "pred_boxes")
        ),
    )[0]
    torch.testing.assert_close(outputs.loss, loss)


@pytest.mark.parametrize("kind", MECHANISMS)
def test_inference_with_a_batch_relates_it_in_one_stream(kind: str) -> None:
    """Table 12; the padding stays out where it is masked."""
    model, _, attachment = trained_pair(kind, mask_padding=True)
    inputs = {**batch(kind, count=3), "labels": None}
    training = attachment.related(model(**inputs))
    with torch.no_grad():
        alone = model.eval()(**inputs)
        with attachment.infer_with_batch():
            together = model(**inputs)
        assert torch.equal(model(**inputs).logits, alone.logits)
    assert together.logits.shape == alone.logits.shape
    torch.testing.assert_close(together.logits, training.logits)
    assert not torch.allclose(together.logits, alone.logits, atol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"encoder_layers": [2]}, "has encoder layers 0 to 1: there is no encoder layer 2"),
        ({"encoder_layers": [0], "blocks": [0]}, "takes only one of before=, after=, blocks= and encoder_layers="),
        ({"after": "model.input_projection", "mask_padding": True}, "needs a layer with an argument"),
        ({"before": "class_labels_classifier", "mask_padding": True}, "needs after=, blocks= or encoder_layers="),
    ],
)
def test_wrong_calls_say_what_to_do(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        bf.attach(BUILD["detr"](), **arguments)


def test_a_model_without_an_encoder_is_asked_for_paths() -> None:
    with pytest.raises(UserError, match=r"Sequential has no encoder\.layers: name submodules with after="):
        bf.attach(nn.Sequential(nn.Linear(2, 2)), encoder_layers=[0])


@pytest.mark.parametrize("kind", ["detr", "segmentation"])
def test_the_model_inside_is_refused_by_itself_in_training(kind: str) -> None:
    """It would take half of the images for the second stream."""
    model, _, attachment = trained_pair(kind)
    images = batch(kind)["pixel_values"]
    inner = model.get_submodule(layer(kind).rsplit(".encoder", 1)[0])
    with pytest.raises(UserError, match="forward cannot be called on its own in training"):
        inner(images)
    with attachment.disabled():
        assert len(inner(images).last_hidden_state) == 2
    assert len(model.eval() and inner(images).last_hidden_state) == 2
    attachment.detach()
    assert "forward" not in inner.__dict__


@pytest.mark.parametrize("kind", ["detr", "smca"])
@pytest.mark.parametrize("place", [{}, {"before": "class_labels_classifier"}])
def test_a_detector_without_a_place_in_its_encoder_is_refused(kind: str, place: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"is a detector.*encoder_layers=\[0\]"):
        bf.attach(BUILD[kind](), **place)


@pytest.mark.parametrize("place", [{}, {"before": "class_labels_classifier"}])
def test_yolos_is_refused_without_a_place_in_it_and_served_with_one(place: dict[str, str]) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.YolosConfig(image_size=[32, 32], patch_size=8, num_detection_tokens=5, **sizes)
    model = transformers.YolosForObjectDetection(config).train()
    with pytest.raises(UserError, match=r"is a detector.*blocks=\[0\]"):
        bf.attach(model, **place)
    attachment = bf.attach(model, blocks=[0], heads=2)
    labels = [{"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.4]])}] * 2
    outputs = model(torch.randn(2, 3, 32, 32), labels=labels)
    assert len(outputs.logits) == 4
    assert outputs.loss.isfinite()
    assert len(attachment.plain(outputs).pred_boxes) == 2


@pytest.mark.parametrize("scope", ["local", "global"])
def test_whole_images_come_with_a_mask_where_other_processes_may_have_padded_ones(scope: str) -> None:
    model, _, attachment = trained_pair("detr", mask_padding=True, scope=scope)
    inputs = batch("detr")
    inputs["pixel_mask"] = torch.ones_like(inputs["pixel_mask"])
    seen = []
    attachment.points[0].module.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no process group
        model(**inputs)
    assert all(valid.all() for valid in seen) if scope == "global" else seen == [None]


@pytest.mark.parametrize("scope", ["local", "global"])
def test_processes_compare_the_canvas_of_their_images_not_its_area_alone(scope: str) -> None:
    model, _, attachment = trained_pair("detr", scope=scope)
    inputs = batch("detr")
    grids = []
    attachment.points[0].module.register_forward_pre_hook(
        lambda _, args, kwargs: grids.append(kwargs["grid"]), with_kwargs=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no process group
        model(**inputs)
        turned = {name: inputs[name].transpose(-1, -2) for name in ("pixel_values", "pixel_mask")}
        model(**{**inputs, **turned})
    height, width = inputs["pixel_values"].shape[-2:]
    assert height != width
    assert grids == ([(height, width), (width, height)] if scope == "global" else [None, None])
