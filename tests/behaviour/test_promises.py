"""Promises 1 to 4 of the design, and those of 5 that need no compiler, on every supported model."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

import batchformer as bf
from batchformer.nn.streams import count_rows

from .cases import Case, tensors, without_randomness


def traces(model: nn.Module) -> dict[str, tuple]:
    """What a person could find on the model: instance attributes, hooks and children of every submodule."""
    return {
        name: (
            tuple(sorted(module.__dict__)),
            tuple(len(v) for k, v in sorted(module.__dict__.items()) if "hooks" in k and isinstance(v, dict)),
            tuple(module._modules),
        )
        for name, module in model.named_modules()
    }


def features_of(model: nn.Module, attachment: bf.Attachment, images: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs in training, and what enters the layer that the first module stands at, as leaves of their own."""
    seen: list[Tensor] = []

    def cut(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(args[0].detach().requires_grad_())
        return (seen[-1], *args[1:])

    handle = model.get_submodule(attachment.points[0].paths[0]).register_forward_pre_hook(cut)
    outputs = model(images)
    handle.remove()
    return tensors(outputs)[0], seen[0]


def switch_checkpointing(model: nn.Module, on: bool) -> None:
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing(on)
    elif on:
        model.gradient_checkpointing_enable()
    else:
        model.gradient_checkpointing_disable()


def test_eval_is_bit_identical_after_attach(case: Case) -> None:
    model, images = case.model().eval(), case.images()
    with torch.no_grad():
        expected = tensors(model(images))
        attachment = case.attach(model)
        outputs = model(images)
        for outs in (tensors(outputs), tensors(attachment.plain(outputs))):
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(outs, expected, strict=True))
        assert attachment.related(outputs) is None


def test_detach_leaves_the_same_object_without_a_trace(case: Case) -> None:
    model = case.model()
    keys, parameters, before = list(model.state_dict()), list(model.parameters()), traces(model)
    attachment = case.attach(model)
    assert set(keys) < set(model.state_dict())
    assert attachment.detach() is model
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert traces(model) == before
    case.model().load_state_dict(model.state_dict(), strict=True)


def test_other_keys_stay_while_attached_and_the_own_ones_are_registered(case: Case) -> None:
    model = case.model()
    keys = set(model.state_dict())
    attachment = case.attach(model)
    added = [key for key in model.state_dict() if key not in keys]
    assert keys <= set(model.state_dict())
    assert len({key.split("batchformer.")[0] for key in added}) == 1
    own = {id(p) for p in attachment.parameters()}
    assert own
    assert own <= {id(p) for p in model.parameters()}


def test_plain_rows_are_the_plain_model_and_related_rows_differ(case: Case) -> None:
    model, twin, images = without_randomness(case.model()), without_randomness(case.model()), case.images()
    attachment = case.attach(model, dropout=0.0)
    outputs, expected = model.train()(images), twin.train()(images)
    assert count_rows(outputs) == 2 * len(images)
    plain, related = attachment.plain(outputs), attachment.related(outputs)
    assert type(plain) is type(related) is type(expected)
    for ours, theirs, others in zip(*map(tensors, (plain, expected, related)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-6)
        assert len(others) == len(images)
        if not torch.equal(
            theirs[0], theirs[1]
        ):  # what is the same for every image, as a detector's first guess of boxes
            assert not torch.allclose(others, theirs, atol=1e-3)
    for (name, ours), (_, theirs) in zip(model.named_buffers(), twin.named_buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda m, name=name: f"{name}: {m}")


def test_the_loss_of_one_sample_reaches_the_others_through_the_module_only(case: Case) -> None:
    model, images = without_randomness(case.model()).train(), case.images()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()  # batch statistics relate the samples too, with or without us
    attachment = case.attach(model, dropout=0.0)
    outputs, features = features_of(model, attachment, images)
    related_zero = outputs[len(images)].square().sum()
    (gradient,) = torch.autograd.grad(related_zero, features, retain_graph=True)
    assert gradient[1:].abs().amax() > 0
    (gradient,) = torch.autograd.grad(outputs[0].square().sum(), features)
    assert gradient[0].abs().amax() > 0
    assert gradient[1:].abs().amax() == 0
    with attachment.disabled():
        outputs, features = features_of(model, attachment, images)
    assert len(outputs) == len(images)
    (gradient,) = torch.autograd.grad(outputs[0].square().sum(), features)
    assert gradient[1:].abs().amax() == 0


def test_a_deep_copy_uses_its_own_modules(case: Case) -> None:
    model, images = without_randomness(case.model()).train(), case.images()
    attachment = case.attach(model, dropout=0.0)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in attachment.parameters():
            parameter.zero_()
    related = tensors(copied(images))[0][len(images) :]
    assert not torch.allclose(related, tensors(model(images))[0][len(images) :])
    attachment.detach()
    assert count_rows(copied(images)) == 2 * len(images)
    bf.detach(copied)
    assert count_rows(copied(images)) == len(images)


def test_a_pickled_model_comes_back_attached(case: Case) -> None:
    model, images = without_randomness(case.model()).train(), case.images()
    if any(map(is_parametrized, model.modules())):
        pytest.skip("torch pickles no weight norm")
    case.attach(model, dropout=0.0)
    loaded = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(tensors(loaded(images)), tensors(model(images)))
    assert list(bf.detach(loaded).state_dict()) == list(case.model().state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast_trains_both_streams(case: Case, dtype: torch.dtype) -> None:
    model, images = case.model().train(), case.images()
    attachment = case.attach(model)
    with torch.autocast("cpu", dtype):
        outputs = model(images)
        loss = bf.TwoStreamLoss(nn.functional.cross_entropy)(tensors(outputs)[0].flatten(1), torch.arange(len(images)))
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in attachment.points[0].module.parameters())


def test_a_batch_of_one_works(case: Case) -> None:
    model, images = case.model().train(), case.images(1)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()  # one value has no variance, with or without us
    case.attach(model)
    assert count_rows(model(images)) == 2


def test_gradient_checkpointing_gives_the_same_gradients(case: Case) -> None:
    model, images = without_randomness(case.model()).train(), case.images()
    if not hasattr(model, "set_grad_checkpointing") and not getattr(model, "supports_gradient_checkpointing", False):
        pytest.skip("this model has no gradient checkpointing of its own")
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()  # recomputation moves running statistics twice, with or without us
    case.attach(model, dropout=0.0)
    gradients = []
    for on in (False, True):
        try:
            switch_checkpointing(model, on)
        except AssertionError:
            pytest.skip("timm refuses gradient checkpointing for this model")
        model.zero_grad()
        tensors(model(images))[0].square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_averages_of_the_weights_follow_the_attached_model(case: Case) -> None:
    from timm.utils import ModelEmaV3

    model, images = case.model(), case.images()
    attachment = case.attach(model)
    averages = (ModelEmaV3(model, decay=0.5), torch.optim.swa_utils.AveragedModel(model))
    averages[1].update_parameters(model)  # the first call copies
    with torch.no_grad():
        for parameter in attachment.parameters():
            parameter.add_(1.0)
    averages[0].update(model)
    averages[1].update_parameters(model)
    for average in averages:
        own = bf.attachment_of(average.module)
        assert own is not None
        for ours, theirs in zip(own.parameters(), attachment.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs - 0.5)
        average.module.eval()
        assert len(tensors(average.module(images))[0]) == len(images)
        assert list(bf.detach(average.module).state_dict()) == list(case.model().state_dict())
