"""Contrast and gradient penalty against loops over rows and finite differences."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from batchformer.losses import gradient_penalty, supervised_contrast


def contrast_by_loops(z, labels, temperature):
    """Khosla et al., eq. 2, row by row; rows without another of their class are left out."""
    of_rows = []
    for i in range(len(z)):
        others = [a for a in range(len(z)) if a != i]
        total = sum(torch.exp(z[i] @ z[a] / temperature) for a in others)
        positive = [p for p in others if labels[p] == labels[i]]
        if positive:
            terms = [torch.log(torch.exp(z[i] @ z[p] / temperature) / total) for p in positive]
            of_rows.append(-sum(terms) / len(positive))
    return sum(of_rows) / len(of_rows)


def test_contrast_is_the_formula_and_leaves_out_rows_without_a_positive():
    torch.manual_seed(0)
    rows = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 1, 0, 2, 1, 0, 3, 1, 0])  # of 2 and 3 there is one row each
    found = supervised_contrast(F.normalize(rows, dim=1), labels, 0.3)
    wanted = contrast_by_loops(F.normalize(rows, dim=1), labels, 0.3)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(value, rows)[0] for value in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    assert gradients[0][[3, 6]].abs().sum() > 0  # they are still what others are told apart from


def test_contrast_is_in_float32_under_autocast():
    torch.manual_seed(0)
    rows, labels = F.normalize(torch.randn(9, 5), dim=1), torch.tensor([0, 1, 0, 2, 1, 0, 3, 1, 0])
    with torch.autocast("cpu", torch.bfloat16):
        found = supervised_contrast(rows, labels, 0.1)
    assert torch.equal(found, supervised_contrast(rows, labels, 0.1))


def test_contrast_of_rows_that_are_all_alone_is_zero_and_finite():
    rows = F.normalize(torch.randn(4, 3), dim=1).requires_grad_()
    loss = supervised_contrast(rows, torch.arange(4), 0.1)
    loss.backward()
    assert loss == 0
    assert torch.isfinite(rows.grad).all()


def test_gradient_penalty_is_that_of_finite_differences_at_points_between():
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    real, fake = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    torch.manual_seed(1)
    found = gradient_penalty(lambda x: critic(x).squeeze(1), real, fake)
    torch.manual_seed(1)
    share = torch.rand(5, 1, dtype=torch.float64)

    def slow(weight=None, step=1e-5):
        """One row at a time; each slope by two calls of the critic."""
        total = 0.0
        for u, r, f in zip(share, real, fake, strict=True):
            x, slopes = u * r + (1 - u) * f, []
            for d in range(3):
                move = torch.zeros(3, dtype=torch.float64)
                move[d] = step
                with torch.no_grad():
                    slopes.append((critic(x + move) - critic(x - move)).item() / (2 * step))
            total += (math.hypot(*slopes) - 1) ** 2
        return total / 5

    assert abs(found.item() - slow()) < 1e-7
    weight = critic[0].weight
    (slope,) = torch.autograd.grad(found, weight)
    before, changed = slow(), []
    for sign in (1, -1):
        with torch.no_grad():
            weight[2, 1] += sign * 1e-4
        changed.append(slow())
        with torch.no_grad():
            weight[2, 1] -= sign * 1e-4
    assert slow() == before
    assert abs(slope[2, 1].item() - (changed[0] - changed[1]) / 2e-4) < 1e-4
