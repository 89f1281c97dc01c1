"""attach in inference mode, to a model on the meta device, scripted, or compiled in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import batchformer as bf

from .small_models import PLACES, TOKENS, Net


@pytest.mark.parametrize("place", PLACES, ids=["before", "after"])
def test_attached_in_inference_mode_the_module_trains_all_the_same(place: dict) -> None:
    model = Net().train()
    with torch.inference_mode():
        attachment = bf.attach(model, **place)
    bf.TwoStreamLoss(nn.CrossEntropyLoss())(model(TOKENS), torch.arange(4) % 3).backward()
    assert all(parameter.grad is not None for parameter in attachment.parameters())


@pytest.mark.parametrize("place", PLACES, ids=["before", "after"])
def test_a_model_without_data_is_attached_to_and_filled_later(place: dict) -> None:
    with torch.device("meta"):
        model = Net().train()
        if "example_inputs" in place:
            place = {**place, "example_inputs": torch.empty(TOKENS.shape)}
    attachment = bf.attach(model, variant="stable", **place)
    assert model(TOKENS.to("meta")).shape == (8, 3)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, torch.nan)
    for part in model.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in attachment.parameters())
    assert attachment.modules[0].layers[0].scale2.unique().item() == pytest.approx(0.1)


@pytest.mark.traced
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripting_says_to_detach_first_and_then_works() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    x = torch.randn(4, 6)
    expected = model(x)
    bf.attach(model, heads=2)
    assert torch.equal(torch.jit.trace(model, x)(x), expected)
    with pytest.raises(AttributeError, match=r"detach it first, bf\.detach\(model\)") as error:
        torch.jit.script(model)
    assert error.value.obj is None  # whose attributes Python would propose behind the message
    assert torch.equal(torch.jit.script(bf.detach(model))(x), expected)


@pytest.mark.traced
@pytest.mark.parametrize("part", ["", "low", "replaced"])
@pytest.mark.parametrize("place", PLACES)
def test_what_was_compiled_in_place_is_looked_at_uncompiled_and_follows(place: dict, part: str) -> None:
    model = Net().train()
    if part == "replaced":
        model.low = torch.compile(model.low, backend="eager")
    else:
        model.get_submodule(part).compile(backend="eager")
    assert len(model(TOKENS)) == 4
    with torch.compiler.set_stance("fail_on_recompile"):  # a compiler that follows the watching never comes to an end
        attachment = bf.attach(model, **place)
    assert len(model(TOKENS)) == 8
    assert len(attachment.detach()(TOKENS)) == 4
