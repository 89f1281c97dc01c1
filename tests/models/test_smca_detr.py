"""SMCA-DETR against a slow reading of the paper, one query, head and cell at a time; its files, its loss, its start."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from batchformer.models.smca_decoder import SpatialModulation, image_extents
from batchformer.models.smca_detr import SMCADetrConfig, SMCADetrForObjectDetection, SMCADetrModel

HEADS = 4
HEIGHT, WIDTH = 64, 96


def build(**config: Any) -> SMCADetrForObjectDetection:
    from transformers import ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 16], depths=[1, 1, 1, 1], layer_type="basic", out_features=["stage3"]
    )
    settings = {
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
        "num_queries": 3,
        "num_labels": 5,
        "dropout": 0.0,
        **config,
    }
    torch.manual_seed(0)
    return SMCADetrForObjectDetection(SMCADetrConfig(backbone_config=backbone, **settings))


def batch() -> dict[str, Any]:
    """The second image is two thirds as wide and half as high as the canvas."""
    mask = torch.ones(2, HEIGHT, WIDTH, dtype=torch.long)
    mask[1, :, 64:] = 0
    mask[1, 32:] = 0
    images = torch.randn(2, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(0)) * mask[:, None]
    labels = [
        {"class_labels": torch.tensor([1, 4]), "boxes": torch.tensor([[0.3, 0.4, 0.2, 0.2], [0.7, 0.6, 0.3, 0.5]])},
        {"class_labels": torch.tensor([2]), "boxes": torch.tensor([[0.6, 0.5, 0.4, 0.3]])},
    ]
    return {"pixel_values": images, "pixel_mask": mask, "labels": labels}


@torch.no_grad()
def slow_log_weight(
    modulation: SpatialModulation, query: Tensor, centre: Tensor, extent: Tensor, head: int, cell: tuple[int, int]
) -> float:
    """log G of the paper for one query, head and cell (row, column)."""
    state = modulation.norm(query)
    middle = [float(centre[axis] * extent[axis]) for axis in range(2)]
    if modulation.offset is not None:
        offset = modulation.offset(state)
        middle = [middle[axis] + float(offset[2 * head + axis]) for axis in range(2)]
    head = head if modulation.maps > 1 else 0
    scales = [1.0, 1.0]
    if modulation.scale is not None:
        numbers = modulation.scale(state).tolist()
        per_map = len(numbers) // modulation.maps
        scales = [numbers[head * per_map + axis % per_map] for axis in range(2)]
    total = 0.0
    for axis, place in enumerate((cell[1] + 0.5, cell[0] + 0.5)):
        squared = scales[axis] ** 2
        rate = squared if modulation.form == "rate" else 1 / squared
        total -= rate * (place - middle[axis]) ** 2 / modulation.beta
    return total


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("form", ["width", "rate"])
@pytest.mark.parametrize("scale", ["independent", "single", "fixed"])
@pytest.mark.parametrize("separate", [True, False], ids=["separate", "shared"])
def test_weight_maps_are_those_of_the_paper(separate: bool, scale: Any, form: Any) -> None:
    torch.manual_seed(1)
    modulation = SpatialModulation(8, HEADS, separate, scale, beta=3.0, form=form)
    if modulation.scale is not None:
        nn.init.normal_(modulation.scale.weight, std=0.1)  # at the start all scales are 1
    queries, centres = torch.randn(2, 3, 8), torch.rand(2, 3, 2)
    valid = torch.ones(2, 3, 4, dtype=torch.bool)
    valid[1, :, 3] = False
    extents = torch.tensor([[4.0, 3.0], [2.5, 3.0]])
    maps = modulation(queries, centres, extents, valid).expand(-1, HEADS, -1, -1)
    for b in range(2):
        for head in range(HEADS):
            for q in range(3):
                weights = {
                    (row, column): math.exp(
                        slow_log_weight(modulation, queries[b, q], centres[b, q], extents[b], head, (row, column))
                    )
                    for row in range(3)
                    for column in range(4)
                    if valid[b, row, column]
                }
                total = sum(weights.values())
                expected = [weights.get((row, column), 0.0) / total for row in range(3) for column in range(4)]
                torch.testing.assert_close(maps[b, head, q].softmax(-1), torch.tensor(expected), atol=1e-5, rtol=1e-4)


def test_co_attention_is_the_softmax_of_scores_and_log_weights() -> None:
    model, inputs = build().eval(), batch()
    for one in model.modules():
        if type(one) is nn.Linear:
            nn.init.xavier_uniform_(one.weight)
    nn.init.normal_(model.model.decoder.layers[1].modulation.scale.weight, std=0.05)  # at the start all scales are 1
    model.set_attn_implementation("eager")  # which gives its weights
    layer, seen = model.model.decoder.layers[1], {}
    layer.register_forward_pre_hook(lambda _, args: seen.update(layer=args))
    attention = layer.encoder_attn
    attention.register_forward_pre_hook(lambda _, args, kwargs: seen.update(attention=kwargs), with_kwargs=True)
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).cross_attentions[1]
        state, _, _, positions, memory, centres, extents, valid = seen["layer"]
        given = seen["attention"]
        q = attention.q_proj(given["hidden_states"] + positions).reshape(2, 3, HEADS, 4)
        k = attention.k_proj(memory + given["encoder_position_embeddings"]).reshape(2, -1, HEADS, 4)
        for b in range(2):
            for head in range(HEADS):
                for query in range(3):
                    scores = [
                        float(q[b, query, head] @ k[b, row * 6 + column, head]) / 2
                        + slow_log_weight(
                            layer.modulation,
                            state[b, query] + positions[b, query],
                            centres[b, query],
                            extents[b],
                            head,
                            (row, column),
                        )
                        if valid[b, row, column]
                        else -math.inf
                        for row in range(4)
                        for column in range(6)
                    ]
                    expected = torch.tensor(scores).softmax(0)
                    torch.testing.assert_close(weights[b, head, query], expected, atol=1e-5, rtol=1e-4)
    assert (weights[1][..., ~valid[1].flatten()] == 0).all()


def test_a_query_looks_at_the_middle_of_its_image_not_of_the_canvas() -> None:
    modulation = SpatialModulation(8, HEADS, separate=False, scale="fixed", beta=0.5)
    mask = batch()["pixel_mask"].bool()
    valid = mask[:, ::16, ::16]
    maps = modulation(torch.zeros(2, 1, 8), torch.full((2, 1, 2), 0.5), image_extents(mask, (4, 6)), valid)
    for one, (rows, columns) in zip(maps[:, 0, 0].unflatten(-1, (4, 6)).exp(), ((4, 6), (2, 4)), strict=True):
        inside = one[:rows, :columns]
        torch.testing.assert_close(inside, inside.flip(0).flip(1))  # symmetric around the middle
        assert (one > 0).sum() == (inside > 0).sum()
        assert inside[rows // 2 - 1, columns // 2 - 1] == 1.0


def test_however_far_a_head_is_led_away_something_is_left_to_attend_to() -> None:
    model, inputs = build(), batch()
    for layer in model.model.decoder.layers:
        nn.init.constant_(layer.modulation.offset.bias, 1e4)
        valid = torch.ones(2, 4, 6, dtype=torch.bool)
        maps = layer.modulation(torch.randn(2, 3, 16), torch.rand(2, 3, 2), torch.full((2, 2), 4.0), valid)
        assert maps.half().isfinite().any(-1).all()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            assert model(**inputs).loss.isfinite()


def test_boxes_begin_at_the_predicted_centres_and_classes_are_rare() -> None:
    model, inputs = build(), batch()
    outputs, inner = model(**inputs), model.model(inputs["pixel_values"], inputs["pixel_mask"])
    torch.testing.assert_close(outputs.pred_boxes[..., :2], inner.reference_points.sigmoid())
    assert (outputs.pred_boxes[..., 2:] == 0.5).all()
    assert outputs.logits.sigmoid().mean() < 0.05
    assert [layer.out_features for layer in model.bbox_predictor.layers] == [16, 16, 4]  # three layers, as DETR has
    for layer in model.model.decoder.layers:
        assert (layer.modulation.scale.bias == 1).all()
        assert layer.modulation.offset.weight.std() > 0.1


def test_classification_weighs_twice_in_the_loss_after_every_layer() -> None:
    outputs = build()(**batch())
    assert set(outputs.loss_dict) >= {"loss_ce", "loss_ce_0", "loss_giou_0"}
    expected = sum(
        weight * value
        for name, value in outputs.loss_dict.items()
        for part, weight in (("loss_ce", 2), ("loss_bbox", 5), ("loss_giou", 2))
        if name.startswith(part)
    )
    torch.testing.assert_close(outputs.loss, expected)


def test_saved_and_loaded_as_any_model_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModel, AutoModelForObjectDetection, DeformableDetrImageProcessor

    model, inputs = build(modulation="shared", modulation_scale="single", modulation_form="rate").eval(), batch()
    model.save_pretrained(tmp_path)
    loaded, problems = AutoModelForObjectDetection.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(problems.values())
    assert type(loaded) is SMCADetrForObjectDetection
    for name in ("modulation", "modulation_scale", "modulation_form", "num_queries", "num_labels"):
        assert getattr(loaded.config, name) == getattr(model.config, name)
    assert type(AutoModel.from_pretrained(tmp_path)) is SMCADetrModel
    with torch.no_grad():
        outputs = loaded.eval()(**inputs)
        assert torch.equal(outputs.pred_boxes, model(**inputs).pred_boxes)
    found = DeformableDetrImageProcessor().post_process_object_detection(
        outputs, threshold=0.0, target_sizes=[(64, 96), (32, 64)]
    )
    assert len(found) == 2
    assert found[1]["boxes"][:, 2].max() <= 64


def test_a_configuration_that_makes_no_sense_is_refused() -> None:
    from huggingface_hub.errors import StrictDataclassFieldValidationError

    with pytest.raises(StrictDataclassFieldValidationError, match="modulation_form"):
        build(modulation_form="length")


def test_gradient_checkpointing_gives_the_same_gradients_and_every_weight_has_one() -> None:
    model, gradients = build().train(), []
    nn.init.normal_(model.bbox_predictor.layers[-1].weight)
    for on in (False, True):
        model.gradient_checkpointing_enable() if on else model.gradient_checkpointing_disable()
        model.zero_grad()
        model(**batch()).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert all(gradient is not None for gradient in gradients[0].values())
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5, rtol=1e-4)


def test_it_learns_a_batch() -> None:
    model, inputs = build(d_model=32, num_queries=6).train(), batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_the_room_of_models_does_not_import_transformers() -> None:
    code = "import batchformer.models, sys; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
