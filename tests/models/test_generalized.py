"""Networks of generalized zero-shot learning against slow definitions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from batchformer.models import generalized
from batchformer.models.generalized import Comparator, Critic, Generator, SumOfReLU, ZeroShotNet, linear_map

from ..interpreter import interpreted


@pytest.mark.parametrize("at_once", [1, 50, 10_000])
def test_comparator_is_its_mlp_on_every_pair(monkeypatch, at_once):
    monkeypatch.setitem(generalized._PAIRS_AT_ONCE, "cpu", at_once)
    torch.manual_seed(0)
    comparator = Comparator(4, 3, 6).double()
    rows, attributes = torch.randn(7, 4).double().requires_grad_(), torch.randn(5, 3).double().requires_grad_()

    def slow():
        scores = []
        for row in rows:
            pairs = [comparator.hidden(torch.cat([row, each])) for each in attributes]
            scores.append(torch.cat([comparator.score(F.leaky_relu(pair, 0.2)) for pair in pairs]))
        return torch.stack(scores)

    found, wanted = comparator(rows, attributes), slow()
    torch.testing.assert_close(found, wanted)
    given, inputs = torch.randn(7, 5).double(), [rows, attributes, *comparator.parameters()]
    for one, other in zip(*(torch.autograd.grad(out, inputs, given) for out in (found, wanted)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(2048, 150, 2048), (70, 3, 33)])
def test_on_a_gpu_pairs_are_those_of_the_definition(sizes):
    torch.manual_seed(0)
    rows, classes, dim = sizes
    inputs = [torch.randn(shape, device="cuda", requires_grad=True) for shape in ((rows, dim), (classes, dim), (dim,))]
    exact = [each.detach().double().requires_grad_() for each in inputs]
    found, given = SumOfReLU.apply(*inputs), torch.randn(rows, classes, device="cuda")
    slopes = torch.autograd.grad(found, inputs, given)
    wanted, sums = [], [torch.zeros_like(each) for each in exact]
    for part, of_part in zip(exact[0].split(64), given.double().split(64), strict=True):
        wanted.append(((part[:, None] + exact[1]).relu() * exact[2]).sum(2))
        for total, slope in zip(sums, torch.autograd.grad(wanted[-1], exact, of_part), strict=True):
            total += slope
    for one, other in zip((found, *slopes), (torch.cat(wanted), *sums), strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


def test_kernels_of_pairs_compute_the_definition():
    assert interpreted(Path(__file__).with_name("interpret_pairs.py")) == ["9 5 6", "70 66 200", "3 150 130"]


def test_comparator_computes_pairs_in_full_precision_under_autocast():
    comparator = Comparator(4, 3, 6)
    rows = torch.randn(7, 4)
    with torch.autocast("cpu", torch.bfloat16):
        scores = comparator(rows, torch.randn(5, 3))
    scores.sum().backward()
    assert scores.dtype == comparator.score.weight.grad.dtype == torch.float32


def test_generator_and_critic_take_attributes_and_are_per_sample():
    torch.manual_seed(0)
    make, critic = Generator(3, 5, None, 8), Critic(3, 5, 8)
    assert (make.noise, Generator(3, 5, 2, 8).noise) == (3, 2)
    attributes = torch.rand(6, 3)
    features = make(attributes)
    assert features.shape == (6, 5)
    assert (features >= 0).all()
    assert not torch.equal(make(attributes), features)  # other noise
    scores = critic(features, attributes)
    alone = torch.cat([critic(features[k : k + 1], attributes[k : k + 1]) for k in range(6)])
    torch.testing.assert_close(scores, alone)
    assert not torch.equal(critic(features, attributes.flip(0)), scores)


def test_the_network_scales_by_the_training_set_and_constant_features_give_zero():
    net = ZeroShotNet(3, 4, 5)
    net.scale_by(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([2.0, 1.0, 4.0]))
    assert net.scaled(torch.tensor([[1.0, 1.0, 5.0]])).tolist() == [[0.5, 0.0, 1.5]]
    assert net(torch.rand(2, 3)).shape == (2, 4)
    assert {"low", "extent"} <= net.state_dict().keys()
    assert ZeroShotNet(3, 4).classifier.in_features == 3


def test_linear_map_is_the_minimum_of_its_objective():
    """Romera-Paredes & Torr: |X V S' - Y|^2 + g |V S'|^2 + l |X V|^2 + g l |V|^2."""
    torch.manual_seed(0)
    x, s = torch.randn(20, 4).double(), torch.rand(6, 3).double()
    seen = torch.tensor([True, False, True, True, False, True])
    labels = torch.tensor([0, 2, 3, 5])[torch.randint(4, (20,))]
    weights = linear_map(x, labels, s, seen, ridge=0.7, attribute_ridge=0.3)
    y = torch.full((20, 4), -1.0).double()
    for row, label in enumerate(labels.tolist()):
        y[row, [0, 2, 3, 5].index(label)] = 1.0
    v = torch.linalg.lstsq(s, weights).solution.T.clone().requires_grad_()  # weights = s v'
    torch.testing.assert_close(s @ v.T, weights)
    known = s[seen]
    loss = (x @ v @ known.T - y).square().sum() + 0.7 * (v @ known.T).square().sum()
    loss = loss + 0.3 * (x @ v).square().sum() + 0.7 * 0.3 * v.square().sum()
    (slope,) = torch.autograd.grad(loss, v)
    assert slope.abs().max() < 1e-9
