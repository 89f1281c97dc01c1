"""The batched graph cut: the global minimum, on grids small enough to try all and against alpha-beta swap on larger."""

import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_sample_image

from batchformer.errors import UserError
from batchformer.mix import graph_cut, saliency_mix
from batchformer.mix.graph_cut import GridEnergy, cut_grid, least_energy
from batchformer.mix.puzzle_energy import puzzle_energy
from batchformer.mix.puzzle_mix import PuzzleMix
from tests.interpreter import interpreted

from . import slow_graph_cut as slow


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_energy(batch: int, labels: int, height: int, width: int, seed: int, edge: int = 40) -> GridEnergy:
    """Integer costs, convex in the label; from edges of nothing to edges that decide."""
    draw = generator(seed)

    def whole(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=draw)

    start = whole(50, batch, 1, height, width)
    first = whole(100, batch, 1, height, width) - 50
    second = first + whole(30, batch, 1, height, width)
    unary = torch.cat([start, start + first, start + first + second], dim=1)[:, :labels]
    scale = (labels - 1) ** 2  # what the slow reference leaves out
    return GridEnergy(
        unary.float(),
        scale * whole(edge, batch, height, width - 1).float(),
        scale * whole(edge, batch, height - 1, width).float(),
    )


def published_energy(batch: int, blocks: int, seed: int, labels: int = 3) -> GridEnergy:
    """Every term of Puzzle-Mix on random saliency, in its integers: 1000 blocks**2 times the costs, cut down."""
    draw = generator(seed)
    saliency = torch.randn(2, batch, blocks, blocks, generator=draw).mul(seed % 3 / 2 + 0.5).exp()
    saliency = saliency / saliency.sum((2, 3), keepdim=True)
    share = torch.rand(batch, generator=draw).clamp(0.02, 0.98)[:, None, None, None]
    chances = torch.tensor([[1, 1], [1, 2]][labels - 2] + [1] * (labels - 2))[None, :, None, None]
    level = torch.arange(labels)[None, :, None, None]
    prior = -(chances * share**level * (1 - share) ** (labels - 1 - level)).log() * 0.2 / blocks**2
    part = level / (labels - 1)
    unary = (1 - part) * saliency[0][:, None] + part * saliency[1][:, None] + prior
    beta = 1.2 / blocks / 16
    right = beta * (1 + 0.5 * (2 * torch.rand(batch, blocks, blocks - 1, generator=draw) - 1))
    down = beta * (1 + 0.5 * (2 * torch.rand(batch, blocks - 1, blocks, generator=draw) - 1))
    whole = [4 * (1000 * blocks**2 * cost).floor() for cost in (unary, right, down)]
    if labels == 3:  # cutting down may bend a straight line by a unit
        whole[0][:, 1] = torch.minimum(whole[0][:, 1], (whole[0][:, 0] + whole[0][:, 2]) / 2)
    return GridEnergy(*whole)


def as_arrays(energy: GridEnergy, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    scale = (energy.unary.shape[1] - 1) ** 2
    return (
        energy.unary[row].long().numpy(),
        (energy.right[row] / scale).long().numpy(),
        (energy.down[row] / scale).long().numpy(),
    )


@pytest.mark.parametrize(("labels", "height", "width"), [(2, 3, 3), (2, 2, 4), (3, 2, 3), (3, 3, 2), (3, 1, 5)])
def test_no_labelling_of_a_small_grid_is_better(labels, height, width):
    for edge in (1, 12, 60):
        energy = random_energy(6, labels, height, width, seed=edge, edge=edge)
        found = energy.of(least_energy(energy))
        for row in range(6):
            assert found[row].item() == slow.try_all(*as_arrays(energy, row))


@pytest.mark.parametrize("labels", [2, 3])
@pytest.mark.parametrize("blocks", [2, 4, 8, 16])
def test_never_worse_than_alpha_beta_swap_with_all_published_terms(blocks, labels):
    for seed in range(3):
        energy = published_energy(4, blocks, seed, labels)
        found = least_energy(energy)
        for row in range(4):
            arrays = as_arrays(energy, row)
            ours = slow.energy(found[row].numpy(), *arrays)
            assert ours == energy.of(found)[row].item()
            assert ours <= slow.energy(slow.swap(*arrays), *arrays)


def test_never_worse_than_alpha_beta_swap_on_photographs():
    """Pictures, the saliency of a network looking at them, and the energy as PuzzleMix builds it."""
    torch.manual_seed(0)
    photographs = [
        torch.from_numpy(load_sample_image(name).copy()).permute(2, 0, 1) / 255 for name in ("china.jpg", "flower.jpg")
    ]
    crops = torch.stack(
        [p[:, y : y + 128, x : x + 128] for p in photographs for y, x in ((0, 0), (150, 300), (290, 500))]
    )
    pictures = torch.nn.functional.avg_pool2d(crops, 4)
    looking = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(3), torch.nn.Flatten(), torch.nn.Linear(800, 5)
    )
    saliency = PuzzleMix(looking, 5).saliency(pictures, torch.eye(5)[[0, 1, 2, 3, 4, 0]])
    share = torch.tensor([0.1, 0.3, 0.5, 0.6, 0.8, 0.9])
    for blocks in (2, 4, 8, 16):
        exact = puzzle_energy(saliency, pictures, torch.tensor([3, 5, 0, 4, 2, 1]), share, blocks=blocks)
        found = exact.of(least_energy(exact))
        whole = GridEnergy(*(4 * (1000 * blocks**2 * part).floor() for part in (exact.unary, exact.right, exact.down)))
        swapped = torch.stack([torch.from_numpy(slow.swap(*as_arrays(whole, row))) for row in range(6)])
        assert (found <= exact.of(swapped) * (1 + 1e-5)).all()


def test_alpha_beta_swap_does_get_stuck_above_the_minimum():
    """Or else the comparison above says little."""
    energy = published_energy(12, 16, seed=1)
    found = energy.of(least_energy(energy))
    swapped = [slow.energy(slow.swap(*as_arrays(energy, row)), *as_arrays(energy, row)) for row in range(12)]
    assert any(ours < theirs for ours, theirs in zip(found.tolist(), swapped, strict=True))


def test_never_worse_than_gco():
    gco = pytest.importorskip("gco")
    steps = np.array([[(i - j) ** 2 / 4 for i in range(3)] for j in range(3)], dtype=np.float32)
    for blocks in (2, 4, 8, 16):
        energy = published_energy(64, blocks, seed=blocks)
        found = energy.of(least_energy(energy))
        for row in range(64):
            unary = np.ascontiguousarray(energy.unary[row].permute(1, 2, 0).to(torch.int32).numpy())
            edges = (energy.down[row].to(torch.int32).numpy(), energy.right[row].to(torch.int32).numpy())
            labels = torch.tensor(gco.cut_grid_graph(unary, steps, *edges, algorithm="swap")).view(1, blocks, blocks)
            one = GridEnergy(*(part[row : row + 1] for part in (energy.unary, energy.right, energy.down)))
            assert found[row] <= one.of(labels)[0]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 10_000), st.sampled_from([1, 30, 300]))
def test_a_binary_cut_is_a_minimum_cut(height, width, seed, edge):
    draw = generator(seed)
    gain = torch.randint(-100, 101, (3, height, width), generator=draw)
    right = torch.randint(edge, (3, height, width - 1), generator=draw)
    down = torch.randint(edge, (3, height - 1, width), generator=draw)
    inside = cut_grid(gain, right, down)
    for row in range(3):
        number = np.arange(height * width).reshape(height, width)
        links = [
            (number[one], number[two], weight)
            for one, weight, two in slow._pairs(right[row].numpy(), down[row].numpy(), height, width)
        ]
        cost = -gain[row].flatten().numpy()
        side = slow.min_cut(cost, np.zeros_like(cost), links)

        def paid(chosen: np.ndarray, cost: np.ndarray = cost, links: list = links) -> int:
            return cost[chosen].sum() + sum(weight for one, two, weight in links if chosen[one] != chosen[two])

        assert paid(inside[row].flatten().numpy()) == paid(side)


def test_a_grid_in_a_batch_is_cut_as_if_alone():
    energies = [published_energy(2, 8, seed) for seed in range(6)]
    energies[2] = GridEnergy(energies[2].unary, 0 * energies[2].right, 0 * energies[2].down)  # done at once
    together = GridEnergy(
        *(torch.cat([getattr(energy, part) for energy in energies]) for part in ("unary", "right", "down"))
    )
    assert least_energy(together).equal(torch.cat([least_energy(energy) for energy in energies]))


def test_costs_of_any_size_are_cut_alike():
    energy = published_energy(4, 8, seed=5)
    for factor in (1e-9, 0.37, 1e6):
        scaled = GridEnergy(energy.unary * factor, energy.right * factor, energy.down * factor)
        ratio = scaled.of(least_energy(scaled)) / factor / energy.of(least_energy(energy))
        torch.testing.assert_close(ratio, torch.ones(4), rtol=1e-5, atol=0)


def test_without_edges_every_cell_takes_its_own_best_label():
    energy = random_energy(3, 3, 5, 6, seed=0, edge=1)
    assert energy.unary.gather(1, least_energy(energy)[:, None])[:, 0].equal(energy.unary.amin(1))


def test_with_endless_edges_all_cells_take_one_label():
    energy = random_energy(3, 3, 5, 6, seed=0)
    stiff = GridEnergy(energy.unary, energy.right + 1e5, energy.down + 1e5)
    found = least_energy(stiff).flatten(1)
    assert found.eq(energy.unary.sum((2, 3)).argmin(1, keepdim=True)).all()


def test_a_flat_energy_and_a_single_cell_are_no_trouble():
    zeros = GridEnergy(torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, 3), torch.zeros(2, 3, 4))
    assert zeros.of(least_energy(zeros)).eq(0).all()
    one = GridEnergy(torch.tensor([3.0, 1.0, 2.0]).view(1, 3, 1, 1), torch.zeros(1, 1, 0), torch.zeros(1, 0, 1))
    assert least_energy(one).item() == 1


def test_energies_that_cannot_be_cut_are_refused():
    good = random_energy(1, 3, 3, 3, seed=0)
    with pytest.raises(UserError, match="below 0"):
        least_energy(GridEnergy(good.unary, good.right - 1e4, good.down))
    with pytest.raises(UserError, match="not convex"):
        least_energy(GridEnergy(-good.unary, good.right, good.down))
    with pytest.raises(UserError, match="not finite"):
        least_energy(GridEnergy(good.unary * float("nan"), good.right, good.down))
    with pytest.raises(UserError, match="3 x 3 cells"):
        least_energy(GridEnergy(good.unary, good.down, good.right))
    with pytest.raises(UserError, match="2 or 3 labels"):
        least_energy(GridEnergy(torch.zeros(1, 4, 3, 3), good.right, good.down))


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [2, 4, 8, 16])
def test_the_gpu_finds_the_same_labels(blocks):
    energy = published_energy(64, blocks, seed=blocks)
    there = GridEnergy(energy.unary.cuda(), energy.right.cuda(), energy.down.cuda())
    assert least_energy(there).cpu().equal(least_energy(energy))


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [2, 4, 8, 16])
def test_with_the_kernel_nothing_waits_and_without_it_the_labels_are_the_same(blocks, monkeypatch):
    energy = published_energy(64, blocks, seed=blocks)
    there = GridEnergy(energy.unary.cuda(), energy.right.cuda(), energy.down.cuda())
    assert graph_cut._kernel(there.unary.device, blocks**2) is not None
    least_energy(there)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = least_energy(there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    monkeypatch.setattr(graph_cut, "_kernel", lambda device, cells: None)
    assert least_energy(there).equal(found)


@pytest.mark.traced
def test_the_kernels_of_the_cut_and_of_saliency_agree_with_the_tensor_operations():
    assert interpreted(Path(__file__).with_name("interpret_kernels.py")) == [
        *("cut 4x4", "cut 3x5", "cut 1x6", "cut 8x8"),
        *("saliency 40x33", "saliency 9x70"),
    ]


def test_programs_of_the_cut_have_sizes_that_triton_takes(monkeypatch):
    """No cut runs: a stand-in for the kernel says how each size of grid would be launched."""
    kernels = pytest.importorskip("batchformer.mix.triton_kernels")
    launched = {}

    class Noted:
        def __getitem__(self, grid):
            return lambda *_, **options: launched.update({grid: options})

    monkeypatch.setattr(kernels, "_cut", Noted())
    for cells in (1, 16, 33, 64, 256, 1000, kernels.LARGEST_GRID):
        gain = torch.zeros(2, cells, dtype=torch.int32)
        kernels.cut_grid_in_one_launch(gain, gain.new_zeros(2, 4, cells), cells)
        block, warps = launched[(2,)]["BLOCK"], launched[(2,)]["num_warps"]
        assert block >= cells
        assert block.bit_count() == warps.bit_count() == 1
        assert 32 * warps <= block


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels run on the CPU")
def test_without_its_kernel_a_method_says_that_it_is_slower():
    """As where Triton is missing: no device of its own is here."""
    cpu = torch.device("cpu")
    with pytest.warns(UserWarning, match="the graph cut runs without its Triton kernel, which is slower"):
        assert graph_cut._kernel.__wrapped__(cpu, 16) is None
    with pytest.warns(UserWarning, match="saliency runs without its Triton kernel, which is slower"):
        assert saliency_mix._kernel.__wrapped__(cpu) is None
    with warnings.catch_warnings(action="error"):
        assert graph_cut._kernel.__wrapped__(cpu, 33**2) is None  # too large for it anywhere: nothing is wrong
