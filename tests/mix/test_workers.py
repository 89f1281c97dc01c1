"""Mixing in the collate_fn of a DataLoader, whose workers have copies of everything."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import timm
import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

import batchformer as bf
from batchformer.errors import UserError

IMAGES, IDS = torch.rand(8, 3, 16, 16), torch.arange(8) % 4


class Collate:
    """Mixes in the worker; gives the share that was drawn, and what was said about it."""

    def __init__(self, mix: bf.mix.Mix) -> None:
        self.mix = mix

    def __call__(self, samples: list) -> tuple[float, list[str]]:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            mixed = self.mix(*default_collate(samples))
        return mixed.share[0].item(), [str(one.message) for one in said]


def epochs(mix: bf.mix.Mix, init: Callable[[int], None] | None = None) -> tuple[list[float], list[str]]:
    """The shares of two epochs of four batches, by two workers."""
    loader = DataLoader(
        TensorDataset(IMAGES, IDS), 2, num_workers=2, collate_fn=Collate(mix), worker_init_fn=init, timeout=60
    )
    batches = []
    for _ in range(2):
        workers = iter(loader)
        try:
            batches += workers
        finally:  # left to the garbage collector after an error, torch waits ten seconds for them
            workers._shutdown_workers()
    return [share for share, _ in batches], [text for _, said in batches for text in said]


def switch(generator: torch.Generator | None = None) -> bf.mix.MixSwitch:
    return bf.mix.MixSwitch([bf.mix.Mixup(4), bf.mix.Mixup(4)], generator=generator)


@pytest.mark.parametrize("make", [partial(bf.mix.Mixup, 4), switch], ids=["mix", "switch"])
def test_workers_draw_numbers_of_their_own_and_say_when_a_generator_makes_them_the_same(make: Callable) -> None:
    shares, said = epochs(make(generator=None))
    assert (len(set(shares)), said) == (8, [])

    shares, said = epochs(make(generator=torch.Generator().manual_seed(3)))
    assert len(set(shares)) == 2  # those of two batches, in both workers and in both epochs
    assert len(said) == 4  # each worker once
    assert all("the same copy of it" in text and "worker_init_fn" in text for text in said)


def test_a_generator_that_is_seeded_in_the_worker_is_taken_as_it_is() -> None:
    mix = bf.mix.Mixup(4, generator=torch.Generator().manual_seed(3))
    shares, said = epochs(mix, init=lambda worker: mix.generator.manual_seed(torch.initial_seed()))
    assert (len(set(shares)), said) == (8, [])


@pytest.mark.parametrize("method", [bf.mix.TransMix, bf.mix.PuzzleMix])
def test_what_asks_the_model_in_training_is_refused_in_a_worker(method: type) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=8, depth=1, num_classes=4)
    mix = method(model, 4)
    with pytest.raises(UserError, match="mix in the training step"):
        epochs(mix)
