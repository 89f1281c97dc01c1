"""One case per model, built anew for each test."""

from __future__ import annotations

import pytest
import torch

from .cases import ALL_CASES, Case, parameters


@pytest.fixture(params=parameters(ALL_CASES), ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(autouse=True)
def _one_thread_and_one_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
