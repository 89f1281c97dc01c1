"""One case per model, built anew for each test."""

from __future__ import annotations

import pytest
import torch

from .cases import CASES, DETECTOR_CASES, TOKEN_CASES, TRANSFORMERS_CASES, Case


@pytest.fixture(params=[*CASES, *TOKEN_CASES, *TRANSFORMERS_CASES, *DETECTOR_CASES], ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(autouse=True)
def _one_thread_and_one_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
