"""StreamGuard warns once when the related stream stays at chance, and not otherwise."""

import copy
import math
import warnings

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F

import batchformer as bf
from batchformer.errors import UserError
from batchformer.nn.two_stream_loss import StreamGuard, chance_loss

CLASSES = 6


def feed(guard: StreamGuard, plain: float, related: float, steps: int) -> int:
    """How many warnings so many steps with these losses give."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(steps):
            guard.update(torch.tensor(plain), torch.tensor(related))
    return len(seen)


CHANCE = math.log(CLASSES)


@pytest.mark.parametrize(
    ("plain", "related", "expected"),
    [
        (0.5 * CHANCE, 0.999 * CHANCE, 1),  # dead
        (0.5 * CHANCE, 1.3 * CHANCE, 1),  # worse than a constant
        (0.5 * CHANCE, 0.6 * CHANCE, 0),  # behind, but learning
        (0.99 * CHANCE, CHANCE, 0),  # neither has begun
    ],
)
def test_it_warns_only_where_the_plain_stream_has_left_the_related_one_at_chance(plain, related, expected):
    assert feed(StreamGuard(CLASSES, every=10), plain, related, 200) == expected


def test_one_stretch_of_bad_luck_is_not_enough():
    guard = StreamGuard(CLASSES, every=10, looks=3)
    for _ in range(4):
        assert feed(guard, 0.5, CHANCE, 20) == 0
        assert feed(guard, 0.5, 0.6, 10) == 0
    assert feed(guard, 0.5, CHANCE, 30) == 1


def test_a_plain_stream_that_is_spoilt_again_by_the_related_one_is_no_excuse():
    guard = StreamGuard(CLASSES, every=10, looks=3)
    assert feed(guard, 0.5 * CHANCE, CHANCE, 10) == 0
    state = copy.deepcopy(guard.state_dict())
    assert feed(guard, 0.95 * CHANCE, CHANCE, 20) == 1
    resumed = StreamGuard(CLASSES, every=10, looks=3)
    resumed.load_state_dict(state)
    assert feed(resumed, 0.95 * CHANCE, CHANCE, 20) == 1


def test_a_network_that_falls_back_to_chance_as_a_whole_is_another_matter():
    guard = StreamGuard(CLASSES, every=10, looks=3)
    assert feed(guard, 0.5 * CHANCE, 0.6 * CHANCE, 50) == 0
    assert feed(guard, CHANCE, CHANCE, 200) == 0


def test_steps_of_the_warm_up_do_not_count():
    assert feed(StreamGuard(CLASSES, every=10, looks=1, warmup=100), 0.5, CHANCE, 109) == 0
    assert feed(StreamGuard(CLASSES, every=10, looks=1, warmup=100), 0.5, CHANCE, 110) == 1


def test_the_sentence_says_what_to_change():
    guard = StreamGuard(CLASSES, every=1, looks=1)
    with pytest.warns(UserWarning, match=r'variant="stable".*dropout.*fewer places'):
        guard.update(torch.tensor(0.5), torch.tensor(CHANCE))


def test_chance_is_the_loss_of_the_best_constant_prediction():
    counts = [70.0, 20.0, 10.0]
    labels = torch.tensor([0] * 70 + [1] * 20 + [2] * 10)
    constant = torch.tensor(counts).log().expand(100, 3)
    assert chance_loss(counts) == pytest.approx(F.cross_entropy(constant, labels).item(), rel=1e-6)
    assert chance_loss(100) == chance_loss(np.int64(100)) == pytest.approx(math.log(100))
    assert chance_loss(torch.tensor(counts)) == pytest.approx(chance_loss(counts))
    for wrong in (1, [5.0, 0.0], 10.0, None, [math.nan, 1.0, 1.0], [math.inf, 1.0]):
        with pytest.raises(UserError, match="two or more classes"):
            StreamGuard(wrong)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 2.5}, "every and looks of 1 or more"),
        ({"looks": "many"}, "every and looks of 1 or more"),
        ({"warmup": -1}, "warmup=-1"),
        ({"at_chance": "high"}, "at_chance='high'"),
        ({"has_learnt": math.nan}, "has_learnt=nan"),
    ],
)
def test_options_that_would_never_warn_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        StreamGuard(CLASSES, **options)


def test_losses_may_be_plain_numbers_but_not_those_of_rows():
    guard = StreamGuard(CLASSES, every=1, looks=1)
    with pytest.warns(UserWarning, match="stays at chance"):
        guard.update(0.5, CHANCE)
    with pytest.raises(UserError, match="every row to update_rows"):
        StreamGuard(CLASSES).update(torch.ones(3), torch.ones(3))


def test_a_state_carries_the_count_and_the_silence_on():
    first = StreamGuard(CLASSES, every=10, looks=1)
    assert feed(first, 0.5, CHANCE, 7) == 0
    second = StreamGuard(CLASSES, every=10, looks=1)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert feed(second, 0.5, CHANCE, 3) == 1
    third = StreamGuard(CLASSES, every=10, looks=1)
    third.load_state_dict(second.state_dict())
    assert feed(third, 0.5, CHANCE, 50) == 0


@pytest.mark.parametrize(
    ("blocks", "depth", "warned"),
    [("all", 24, True), ([8], 10, False)],
    ids=["published, after all blocks", "published, after one block"],
)
def test_in_a_training_loop_of_ones_own(blocks, depth, warned):
    """The published form after every block of a deep, narrow ViT leaves the related rows at chance; after one not."""
    torch.manual_seed(0)
    prototypes = torch.randn(10, 3, 8, 8)
    vit = timm.create_model(
        "deit_tiny_patch16_224", img_size=8, patch_size=4, embed_dim=16, depth=depth, num_heads=2, num_classes=10
    )
    attachment = bf.attach(vit, blocks=blocks, heads=2)
    optimizer = torch.optim.AdamW(vit.parameters(), lr=3e-3)
    guard = StreamGuard(10, every=5, warmup=20)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(40):
            labels = torch.randint(10, (32,))
            logits = vit(prototypes[labels] + 0.6 * torch.randn(32, 3, 8, 8))
            rows = F.cross_entropy(logits, bf.repeat_targets(labels, logits), reduction="none")
            optimizer.zero_grad()
            rows.mean().backward()
            optimizer.step()
            guard.update_rows(rows, attachment)
    assert guard.warned == warned, (rows[:32].mean(), rows[32:].mean())
    assert len([w for w in seen if "related stream" in str(w.message)]) == warned


def test_losses_of_one_stream_are_no_step():
    """Evaluation, a disabled module and `streams="single"`: there is nothing to compare."""
    guard = StreamGuard(CLASSES, every=1, looks=1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, CLASSES))
    single = bf.attach(model, streams="single", heads=2)
    guard.update_rows(torch.ones(6), single)
    single.detach()
    attachment = bf.attach(model, heads=2)
    with attachment.disabled():
        guard.update_rows(torch.ones(6), attachment)
    model.eval()
    guard.update_rows(torch.ones(6), attachment)
    assert guard.state_dict()["steps"] == 0
    model.train()
    guard.update_rows(torch.ones(6), attachment)
    assert guard.state_dict()["steps"] == 1
