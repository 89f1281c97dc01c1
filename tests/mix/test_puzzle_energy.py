"""The energy and the transport of Puzzle-Mix against the same written out for one pair."""

import numpy as np
import pytest
import torch

from batchformer.mix.graph_cut import least_energy
from batchformer.mix.puzzle_energy import cell_saliency, move_cells, puzzle_energy, transport_plan

from . import slow_puzzle as slow


def pair(height: int, width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    saliency = torch.randn(3, height, width, generator=draw).exp()
    pictures = torch.rand(3, 3, height, width, generator=draw)
    return saliency, pictures


@pytest.mark.parametrize("labels", [2, 3])
@pytest.mark.parametrize(("height", "width", "blocks"), [(16, 16, 2), (16, 16, 8), (24, 40, 4), (28, 14, 2)])
def test_every_term_is_the_published_one(height, width, blocks, labels):
    saliency, pictures = pair(height, width)
    partner = torch.tensor([2, 0, 1])
    share = torch.tensor([0.3, 0.62, 0.95])
    options = {"labels": labels, "beta": 1.3, "gamma": 0.7, "eta": 0.4, "neighbourhood": 4}
    energy = puzzle_energy(saliency, pictures, partner, share, blocks=blocks, **options)
    steps = torch.randint(labels, (3, blocks, blocks), generator=torch.Generator().manual_seed(1))
    found = energy.of(steps)
    for row in range(3):
        other = partner[row]
        expected = slow.energy(
            steps[row].numpy() / (labels - 1),
            (saliency[row].double().numpy(), saliency[other].double().numpy()),
            (pictures[row].double().numpy(), pictures[other].double().numpy()),
            share[row].item(),
            **options,
        )
        assert found[row].item() == pytest.approx(expected, rel=1e-5)


def test_the_cut_can_take_the_energy_at_every_share():
    saliency, pictures = pair(16, 16)
    for share in (0.0, 1e-7, 0.5, 1.0):
        energy = puzzle_energy(saliency, pictures, torch.tensor([1, 2, 0]), torch.tensor([share]), blocks=4)
        mask = least_energy(energy) / 2
        assert energy.of(least_energy(energy)).isfinite().all()
        if share in (0.0, 1.0):
            assert abs(mask.mean().item() - share) < 0.35


def test_a_larger_share_asks_for_more_of_image_b():
    saliency, pictures = pair(16, 16)
    partner = torch.tensor([1, 2, 0])
    parts = [
        least_energy(puzzle_energy(saliency, pictures, partner, torch.tensor([share]), blocks=8, eta=1.0)).sum().item()
        for share in (0.1, 0.3, 0.5, 0.7, 0.9)
    ]
    assert parts == sorted(parts)
    assert parts[0] < parts[-1]


def test_an_image_without_saliency_counts_evenly():
    cells = cell_saliency(torch.stack([torch.zeros(8, 8), torch.full((8, 8), torch.nan), torch.rand(8, 8)]), 4, 4)
    torch.testing.assert_close(cells.sum((1, 2)), torch.ones(3))
    torch.testing.assert_close(cells[:2], torch.full((2, 4, 4), 1 / 16))


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("eps", [0.01, 0.1, 0.8])
def test_what_is_shown_after_transport_is_what_the_dense_plan_shows(size, eps):
    draw = torch.Generator().manual_seed(size)
    saliency = torch.randn(6, size, size, generator=draw).mul(1.5).exp().double()
    saliency = saliency / saliency.sum((1, 2), keepdim=True)
    shown = torch.rand(6, size, size, generator=draw) < 0.5
    plan = transport_plan(saliency, shown, eps=eps)
    moved = 0
    for row in range(6):
        dense = slow.transport(saliency[row].numpy(), shown[row].double().numpy(), eps)
        places = np.flatnonzero(shown[row].numpy())
        assert (dense[places] >= 0).all()
        np.testing.assert_array_equal(plan[row].numpy()[places], dense[places])
        moved += (dense[places] != places).sum()
    assert moved > 0 or eps == 0.8


def test_no_shown_cell_appears_twice_and_shown_saliency_never_falls():
    draw = torch.Generator().manual_seed(0)
    saliency = torch.rand(8, 8, 8, generator=draw)
    shown = torch.rand(8, 8, 8, generator=draw) < 0.4
    plan = transport_plan(saliency / saliency.sum((1, 2), keepdim=True), shown, eps=0.01)
    for row in range(8):
        seen = plan[row][shown[row].flatten()]
        assert len(seen.unique()) == len(seen)
        assert saliency[row].flatten()[seen].sum() >= saliency[row][shown[row]].sum()


def test_torchs_default_precision_moves_nothing_elsewhere():
    torch.manual_seed(0)
    saliency, shown = torch.rand(16, 28, 28) ** 4, torch.rand(16, 28, 28) < 0.5
    saliency /= saliency.sum((1, 2), keepdim=True)
    wanted = transport_plan(saliency, shown, eps=0.05)
    torch.set_default_dtype(torch.bfloat16)
    try:
        plan = transport_plan(saliency, shown, eps=0.05)
    finally:
        torch.set_default_dtype(torch.float32)
    assert plan.equal(wanted)


def test_cells_move_as_the_plan_says():
    images = torch.rand(2, 3, 6, 8)
    source = torch.stack([torch.randperm(8), torch.arange(8)])
    moved = move_cells(images, source, rows=2, columns=4)
    last = move_cells(images.to(memory_format=torch.channels_last), source, rows=2, columns=4)
    assert torch.equal(last, moved)
    assert moved.is_contiguous()
    assert last.is_contiguous(memory_format=torch.channels_last)
    for place, cell in enumerate(source[0].tolist()):
        (y, x), (v, u) = (divmod(place, 4), divmod(cell, 4))
        there = moved[0, :, 3 * y : 3 * y + 3, 2 * x : 2 * x + 2]
        assert there.equal(images[0, :, 3 * v : 3 * v + 3, 2 * u : 2 * u + 2])
    assert moved[1].equal(images[1])
