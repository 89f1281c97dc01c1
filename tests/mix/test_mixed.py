"""What every mix shares: labels, draws, partners, errors."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import batchformer as bf
from batchformer.errors import UserError
from batchformer.mix.base import sample_beta, soft_labels

METHODS = (bf.mix.Mixup, bf.mix.CutMix)


def batch(count: int = 6, height: int = 12, width: int = 17, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, 3, height, width, generator=generator), torch.arange(count) % classes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("per_sample", [False, True])
@settings(max_examples=20, deadline=None)
@given(
    count=st.integers(2, 7),
    size=st.tuples(st.integers(2, 20), st.integers(2, 20)),
    seed=st.integers(0, 2**31),
    alpha=st.sampled_from([0.1, 0.8, 1.0, 4.0]),
    smoothing=st.sampled_from([0.0, 0.1]),
    partner=st.sampled_from(["random", "flip"]),
)
def test_targets_sum_to_one_and_the_same_seed_gives_the_same_batch(
    method, per_sample, count, size, seed, alpha, smoothing, partner
):
    images, ids = batch(count, *size)

    def mixed() -> bf.mix.Mixed:
        return method(
            num_classes=4,
            alpha=alpha,
            per_sample=per_sample,
            label_smoothing=smoothing,
            partner=partner,
            generator=torch.Generator().manual_seed(seed),
        )(images, ids)

    one, other = mixed(), mixed()
    torch.testing.assert_close(one.targets().sum(1), torch.ones(count))
    assert one.targets().min() >= 0
    assert one.share.shape == one.partner.shape == (count,)
    assert sorted(one.partner.tolist()) == list(range(count))
    assert torch.equal(one.images, other.images)
    assert torch.equal(one.targets(), other.targets())
    # the label is shared as the pixels are
    y = soft_labels(ids, 4, smoothing)
    for i, j in enumerate(one.partner.tolist()):
        torch.testing.assert_close(one.targets()[i], (1 - one.share[i]) * y[i] + one.share[i] * y[j])


@pytest.mark.parametrize("method", METHODS)
def test_ids_and_their_one_hot_rows_give_the_same_targets(method):
    images, ids = batch(5)
    soft = torch.nn.functional.one_hot(ids, 4).double()
    made = [method(4, generator=torch.Generator().manual_seed(3))(images, y).targets() for y in (ids, soft)]
    assert torch.equal(*made)


def test_smoothing_is_that_of_the_released_code():
    # as timm.data.mixup.one_hot: off = s / K everywhere, 1 - s + off at the label
    from timm.data.mixup import mixup_target

    ids = torch.tensor([0, 3, 1])
    torch.testing.assert_close(soft_labels(ids, 5, 0.1), mixup_target(ids, 5, lam=1.0, smoothing=0.1))


def test_no_gradient_flows_into_soft_targets():
    images, _ = batch(4)
    teacher = torch.randn(4, 4, requires_grad=True)
    assert not bf.mix.CutMix(4)(images, teacher.softmax(1)).targets().requires_grad


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_lambda_has_the_moments_of_the_beta_distribution(alpha):
    drawn = sample_beta(alpha, 20_000, torch.Generator().manual_seed(0), torch.device("cpu"))
    expected = torch.distributions.Beta(alpha, alpha)
    assert abs(drawn.mean() - expected.mean) < 0.01
    assert abs(drawn.var() - expected.variance) < 0.01


@pytest.mark.parametrize("alpha", [1e-4, 1e-3, 0.01, 0.05, 0.2, 1.0])
def test_the_smaller_alpha_the_fewer_images_are_halves(alpha):
    drawn = sample_beta(alpha, 20_000, torch.Generator().manual_seed(0), torch.device("cpu"))
    between = ((drawn > 0.1) & (drawn < 0.9)).double().mean().item()
    expected = stats.beta(alpha, alpha).cdf(0.9) - stats.beta(alpha, alpha).cdf(0.1)
    assert abs(between - expected) < 5 * (expected / len(drawn)) ** 0.5
    assert drawn.min() > 0  # 0 is that of an image left alone
    assert drawn.max() < 1


def test_without_a_generator_torchs_global_one_is_drawn_from():
    images, ids = batch()
    mix = bf.mix.CutMix(4)
    made = []
    for _ in range(2):
        torch.manual_seed(5)
        made.append(mix(images, ids).images)
    assert torch.equal(*made)
    assert not torch.equal(mix(images, ids).images, made[0])


@pytest.mark.parametrize("method", METHODS)
def test_prob_leaves_that_many_images_alone(method):
    images, ids = batch(200, 4, 4)
    mix = method(4, prob=0.25, per_sample=True, partner="flip", generator=torch.Generator().manual_seed(0))
    untouched = sum(int((mix(images, ids).images == images).flatten(1).all(1).sum()) for _ in range(10))
    # of 2000 images 1500 are left alone; CutMix now and then draws an empty box in so small an image
    assert 1400 < untouched < (1600 if method is bf.mix.Mixup else 1900)
    none = method(4, prob=0.0)(images, ids)
    assert torch.equal(none.images, images)
    assert torch.equal(none.targets(), soft_labels(ids, 4))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda mix: pickle.loads(pickle.dumps(mix))])
def test_a_copy_goes_on_from_the_same_random_state(copied):
    images, ids = batch()
    mix = bf.mix.MixSwitch([bf.mix.Mixup(4), bf.mix.CutMix(4)], generator=torch.Generator().manual_seed(2))
    mix(images, ids)
    twin = copied(mix)
    for _ in range(4):
        assert torch.equal(mix(images, ids).images, twin(images, ids).images)


EVERY = {
    "mixup": lambda model, **given: bf.mix.Mixup(4, label_smoothing=0.1, **given),
    "mixup of a small alpha": lambda model, **given: bf.mix.Mixup(4, alpha=0.05, **given),
    "cutmix": lambda model, **given: bf.mix.CutMix(4, **given),
    "transmix": lambda model, **given: bf.mix.TransMix(model, 4, **given),
    "rollout": lambda model, **given: bf.mix.TransMix(model, 4, block="rollout", **given),
    "saliencymix": lambda model, **given: bf.mix.SaliencyMix(4, **given),
    "attentive cutmix": lambda model, **given: bf.mix.AttentiveCutMix(torch.nn.AvgPool2d(32), 4, size=None, **given),
    "puzzlemix": lambda model, **given: bf.mix.PuzzleMix(model, 4, blocks=16, **given),
}


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("method", EVERY)
def test_torchs_default_precision_changes_nothing(method, default):
    """Lightning sets it for a run in bf16-true, and large images have more places than half precision has numbers."""
    torch.manual_seed(0)
    options = {"img_size": 288, "patch_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 4}
    model = timm.create_model("cait_xxs24_224", **options)
    images, ids = torch.randn(4, 3, 288, 288), torch.arange(4)

    def made():
        with EVERY[method](model, per_sample=True, generator=torch.Generator().manual_seed(5)) as mix:
            mixed = mix(images, ids)
            model(mixed.images)
            return mixed.images, mixed.targets(), mixed.label_share()

    wanted = made()
    torch.set_default_dtype(default)
    try:
        got = made()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(one.dtype == other.dtype and one.equal(other) for one, other in zip(wanted, got, strict=True))


@pytest.mark.parametrize("method", [*EVERY, "switch"])
def test_torchs_default_device_changes_nothing(method):
    """What is drawn is drawn where the generator is, what is mixed stays where the images are."""
    torch.manual_seed(0)
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2, "num_classes": 4}
    model = timm.create_model("xcit_nano_12_p8_224", **options).eval()
    images, ids, made = torch.randn(4, 3, 64, 64), torch.arange(4), []
    for device in ("meta", "cpu"):
        given = {"generator": torch.Generator("cpu").manual_seed(5)}
        with torch.device(device):
            if method == "switch":
                mix = bf.mix.MixSwitch([bf.mix.Mixup(4), bf.mix.CutMix(4)], **given)
            else:
                mix = EVERY[method](model, **given)
            with mix:
                mixed = mix(images, ids)
                model(mixed.images)
                made.append((mixed.images, mixed.targets()))
    assert all(one.equal(other) for one, other in zip(*made, strict=True))


@pytest.mark.parametrize(
    ("images", "targets", "message"),
    [
        (torch.zeros(1, 3, 8, 8), torch.zeros(1).long(), "this batch has 1"),
        (torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(4).long(), "float images"),
        (torch.zeros(4, 8, 8), torch.zeros(4).long(), "float images"),
        (torch.zeros(4, 3, 8, 8), torch.zeros(3).long(), "4 images and 3 targets"),
        (torch.zeros(4, 3, 8, 8), torch.tensor(3), "4 images and 1 targets"),
        (torch.zeros(4, 3, 8, 8), torch.full((4,), 7), "class ids from 7 to 7"),
        (torch.zeros(4, 3, 8, 8), torch.zeros(4, 6), r"soft targets \(batch, 5\)"),
        (torch.zeros(4, 3, 8, 8), torch.zeros(4), "class ids"),
        (torch.zeros(4, 3, 8, 8), [0, 1, 2, 3], "the targets are a list"),
        (torch.zeros(4, 3, 0, 8), torch.zeros(4).long(), "float images"),
        (torch.zeros(4, 3, 8, 8), torch.zeros(4, device="meta").long(), "images are on cpu and the targets on meta"),
    ],
)
def test_a_batch_that_cannot_be_mixed_is_refused(images, targets, message):
    with pytest.raises(UserError, match=message):
        bf.mix.CutMix(5)(images, targets)


def test_a_number_of_classes_may_come_from_numpy():
    assert bf.mix.CutMix(np.int64(5))(torch.zeros(2, 3, 8, 8), torch.arange(2)).targets().shape == (2, 5)


@pytest.mark.parametrize(
    "wrong",
    [{"alpha": 0}, {"alpha": float("inf")}, {"alpha": 1e300}, {"alpha": "a"}, {"prob": 1.5}, {"prob": None},
     {"label_smoothing": 1.0}, {"label_smoothing": (0.1,)}, {"partner": "roll"}, {"num_classes": 0}, {"generator": 42}],
    ids=lambda wrong: next(iter(wrong)),
)  # fmt: skip
def test_a_wrong_option_is_named(wrong):
    with pytest.raises(UserError, match=f"CutMix: {next(iter(wrong))}="):
        bf.mix.CutMix(**{"num_classes": 5, **wrong})


@pytest.mark.parametrize("method", [bf.mix.TransMix, bf.mix.PuzzleMix, bf.mix.AttentiveCutMix])
@pytest.mark.parametrize("first", [5, "vit_tiny_patch16_224"])
def test_what_stands_in_the_place_of_the_model_is_named_by_its_type(method, first):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    said = f"{method.__name__} takes .*an nn.Module, and then .*of the type {type(first).__name__}.$"
    with pytest.raises(UserError, match=said):
        method(first, model)
    with pytest.raises(UserError, match="num_classes=a Sequential must be"):
        method(model, model)
