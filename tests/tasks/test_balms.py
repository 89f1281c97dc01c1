"""BALMS: the meta gradient against finite differences, the inner step against torch's SGD, draws, what is refused."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from batchformer.data import DigitsLT, ListFiles
from batchformer.data.sets import write_miniature
from batchformer.errors import UserError
from batchformer.losses import BalancedSoftmaxLoss
from batchformer.tasks import LongTailed
from batchformer.tasks.long_tailed.balms import LearntOrder, MetaSampler, inner_step, straight_through

from .test_decoupled import SMALL, fit

COUNTS = [30, 9, 4]
OPTIMIZERS = {
    "plain": {},
    "momentum and decay": {"momentum": 0.9, "weight_decay": 0.05},
    "nesterov": {"momentum": 0.9, "weight_decay": 0.05, "nesterov": True},
    "dampening": {"momentum": 0.5, "dampening": 0.3},
}


def problem(options, steps=2):
    """A classifier in the middle of its training: features, labels, and an optimizer that has made some steps."""
    torch.manual_seed(0)
    layer = nn.Linear(5, 3).double()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.3, **options)
    features, labels = torch.randn(7, 5).double(), torch.tensor([0, 0, 1, 0, 2, 1, 0])
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(layer(torch.randn(7, 5).double()), labels).backward()
        optimizer.step()
    return layer, optimizer, features, labels


def rows(logits, labels):
    return BalancedSoftmaxLoss(COUNTS, "none")(logits, labels)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_inner_step_is_the_optimizers_own(name, steps):
    layer, optimizer, features, labels = problem(OPTIMIZERS[name], steps)
    before = [p.detach().clone() for p in layer.parameters()]
    found = inner_step(layer, optimizer, torch.ones(7).double(), features, labels, rows)
    assert all(torch.equal(p, old) for p, old in zip(layer.parameters(), before, strict=True))
    optimizer.zero_grad()
    rows(layer(features), labels).mean().backward()
    optimizer.step()
    for key, parameter in layer.named_parameters():
        torch.testing.assert_close(found[key], parameter.detach())


def noise_of(seed, log_weights, drawn):
    """The noise of `straight_through` under this seed, class by class: with it the class drawn is the largest."""
    torch.manual_seed(seed)
    exponential = log_weights.new_empty(len(drawn), len(log_weights)).exponential_()
    leading = log_weights.new_empty(len(drawn)).exponential_()
    total = log_weights.exp().sum()
    noise = torch.empty(len(drawn), len(log_weights)).double()
    for i, k in enumerate(drawn.tolist()):
        top = (total / leading[i]).log()
        for c in range(len(log_weights)):
            value = top if c == k else -((-top).exp() + exponential[i, c] * (-log_weights[c]).exp()).log()
            noise[i, c] = value - log_weights[c]
            assert value <= top
    return noise


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_meta_gradient_is_that_of_finite_differences(name):
    """Of the meta loss after the inner step, at the sampler's logits, for the noise drawn: s = 1 + soft - soft(now)."""
    layer, optimizer, features, labels = problem(OPTIMIZERS[name])
    meta, meta_labels = torch.randn(9, 5).double(), torch.arange(9) % 3
    sampler = MetaSampler(COUNTS, 0.3).double()
    now = sampler.log_weights(sampler.logits)
    noise = noise_of(5, now, labels)

    def soft(phi):
        return (sampler.log_weights(phi) + noise).softmax(1)[range(7), labels]

    def meta_loss(phi):
        weights = 1 + soft(phi) - soft(sampler.logits)
        after = inner_step(layer, optimizer, weights, features, labels, rows)
        return F.cross_entropy(F.linear(meta, after["weight"], after["bias"]), meta_labels).item()

    phi = sampler.logits.clone().requires_grad_()
    torch.manual_seed(5)
    weights = straight_through(sampler.log_weights(phi), labels)
    assert torch.equal(weights, torch.ones(7).double())
    after = inner_step(layer, optimizer, weights, features, labels, rows)
    loss = F.cross_entropy(F.linear(meta, after["weight"], after["bias"]), meta_labels)
    (found,) = torch.autograd.grad(loss, phi)
    step = 1e-5
    for c in range(3):
        shift = step * torch.eye(3).double()[c]
        wanted = (meta_loss(sampler.logits + shift) - meta_loss(sampler.logits - shift)) / (2 * step)
        assert found[c].item() == pytest.approx(wanted, rel=1e-4, abs=1e-9)
    assert found.abs().max() > 1e-5


def test_noise_given_the_draw_has_the_distribution_of_noise_that_draws():
    """Draw classes by noise, as Gumbel-softmax does, and noise for classes that were drawn otherwise: the same."""
    torch.manual_seed(0)
    log_weights, count = torch.tensor([30.0, 9.0, 4.0]).log(), 40_000
    gumbel = -torch.empty(count, 3).exponential_().log()
    first = (log_weights + gumbel).argmax(1)
    wanted = (log_weights + gumbel).softmax(1)[range(count), first]
    drawn = torch.multinomial(log_weights.exp(), count, replacement=True)
    phi = log_weights.clone().requires_grad_()
    weights = straight_through(phi, drawn)
    for k in range(3):
        (gradient,) = torch.autograd.grad(weights[drawn == k].mean(), phi, retain_graph=True)
        # d soft_k / d phi_k = soft_k (1 - soft_k)
        expected = (wanted * (1 - wanted))[first == k].mean()
        assert gradient[k].item() == pytest.approx(expected.item(), abs=0.01)


class TestSampler:
    @pytest.mark.parametrize("power", [0.0, 0.3, 1.0])
    def test_probabilities_begin_as_a_power_of_the_counts(self, power):
        found = MetaSampler(COUNTS, power).logits.sigmoid().double()
        wanted = torch.tensor(COUNTS).double() ** -power
        torch.testing.assert_close(found, wanted / (wanted.min() + wanted.max()), atol=1e-6, rtol=0)

    def test_its_update_is_adams(self):
        sampler, twin = MetaSampler(COUNTS, 0.3), MetaSampler(COUNTS, 0.3).logits.clone().requires_grad_()
        adam = torch.optim.Adam([twin], lr=0.02)
        for k in range(4):
            twin.grad = torch.tensor([1.0, -2.0, 0.5]) * (k - 1)
            adam.step()
            sampler.update(twin.grad.clone(), 0.02)
        torch.testing.assert_close(sampler.logits, twin.detach())

    def test_an_epoch_is_drawn_from_the_probabilities_at_its_start(self):
        labels = np.repeat(np.arange(3), COUNTS)
        sampler = MetaSampler(COUNTS, 0.0)
        order = LearntOrder(sampler, labels, seed=0)
        sampler.logits.copy_(torch.tensor([-20.0, -20.0, 3.0]))
        before = order(1)
        assert set(labels[before % 43]) == {0, 1, 2}  # still those from before
        sampler.begin_epoch(1)
        assert set(labels[order(1) % 43]) == {2}
        sampler.logits.fill_(0.0)
        sampler.begin_epoch(1)  # a run that resumes within the epoch
        assert set(labels[order(1) % 43]) == {2}
        sampler.begin_epoch(2)
        assert set(labels[order(2) % 43]) == {0, 1, 2}


@pytest.mark.parametrize("method", ["baseline", "batchformer"])
@pytest.mark.parametrize("stream", ["plain", "related"])
def test_end_to_end_everything_learns(method, stream):
    task = LongTailed(**SMALL, algorithm="balms", method=method, balms={"meta_batch": 32, "meta_stream": stream})
    task.construct(DigitsLT().info)
    before = {name: value.clone() for name, value in task.state_dict().items()}
    metrics = fit(task).callback_metrics
    still = [name for name, value in task.state_dict().items() if torch.equal(value, before[name])]
    assert [name for name in still if not name.startswith("metrics.")] == ["algorithm.meta.drawn"]
    assert metrics["train/meta_loss"] > 0
    assert metrics["train/loss"] > 0


def test_the_meta_loss_is_that_of_rows_that_went_through_the_module_or_not():
    """Without a learning rate W' is W: cross entropy of the meta batch, which the module in eval mode leaves alone."""
    found = {}
    for stream in ("plain", "related"):
        options = {"meta_batch": 64, "meta_stream": stream}
        task = LongTailed(**SMALL, algorithm="balms", balms=options, optimizer={"lr": 0.0})
        found[stream] = fit(task, limit_train_batches=1).callback_metrics["train/meta_loss"].item()
    batch = first_meta_batch(task)
    task.eval()
    with torch.no_grad():
        wanted = F.cross_entropy(task(batch["images"]), batch["labels"]).item()
    assert found["plain"] == pytest.approx(wanted, rel=1e-5)
    assert found["related"] != pytest.approx(wanted, rel=1e-3)


def first_meta_batch(task):
    """Of the training; `iter` would give that of the epoch after it."""
    return next(task.algorithm.training_loader(task, task.trainer.datamodule)["meta"]._batches(0, 0))


def test_a_meta_batch_has_every_class_equally_often_of_the_images_chosen():
    data = DigitsLT(batch_size=64)
    task = LongTailed(**SMALL, algorithm="balms", balms={"meta_batch": 400, "meta_per_class": 3})
    fit(task, data, limit_train_batches=1)
    chosen = task.algorithm.meta_samples(task, data)
    assert np.bincount(data.train_labels[chosen]).tolist() == [3] * 10
    labels = first_meta_batch(task)["labels"]
    assert torch.bincount(labels).tolist() == pytest.approx([40] * 10, abs=20)


def checked(**options):
    data, task = DigitsLT(), LongTailed(**SMALL, algorithm="balms", **options)
    task.construct(data.info)
    task.check_data(data)


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"meta_per_class": 8}, r"of class 9 \(9\) the set train has 7 images: take 7 or fewer"),
            ({"meta_set": "val"}, "results are measured on it; there are: train"),
            ({"meta_set": "meta"}, "there is no such set; there are: train"),
            ({"meta_batch": 0}, "meta_batch=0 must be 1 or more"),
            ({"lr": -0.1}, "lr=-0.1"),
            ({"meta_stream": "both"}, "meta_stream='both'"),
        ],
    )
    def test_meta_sets_that_cannot_be(self, options, said):
        with pytest.raises(UserError, match=said):
            checked(balms=options)

    def test_what_does_not_go_with_it(self):
        for options, said in [
            ({"sampling": "square_root"}, "leave model.sampling out"),
            ({"loss": {"name": "ldam"}}, "ldam cannot be combined with model.algorithm=balms"),
            ({"decoupled": {"features": "cached"}}, "set model.balms.frozen to true"),
        ]:
            with pytest.raises(UserError, match=said):
                checked(**options)


def test_a_list_of_its_own_for_the_meta_set(tmp_path):
    root = write_miniature("places-lt", tmp_path / "places")
    names = {"train_list": "Places_LT_train.txt", "val_list": "Places_LT_test.txt"}
    data = ListFiles(str(root), **names, meta_list="Places_LT_val.txt", image_size=16, batch_size=16, workers=0)
    assert data.info.class_counts[-1] == 2
    assert set(data.set_labels) == {"train", "val", "meta"}
    task = LongTailed(**SMALL, algorithm="balms", balms={"meta_set": "meta", "meta_batch": 16})
    task.construct(data.info)
    task.check_data(data)
    fit(task, data, limit_train_batches=1)
    batch = first_meta_batch(task)
    assert len(batch["images"]) == 16
    (root / "Places_LT_train.txt").write_text("data_256/c/class_0/00000000.jpg 0\n" * 7 + "x 6\n")
    other = ListFiles(str(root), **names, meta_list="Places_LT_val.txt")
    with pytest.raises(UserError, match=r"label 7 .* is not one of the 7 classes"):
        other.setup()
