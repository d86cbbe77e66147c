"""Fixtures of the tests of ops with several implementations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.backend import Backend, backends


@pytest.fixture(params=backends(), ids=lambda b: f"{b.implementation}-{b.device}")
def backend(request: pytest.FixtureRequest) -> Backend:
    found: Backend = request.param
    return found


@pytest.fixture
def poisoned() -> Iterator[None]:
    """torch.empty holds NaN, or the largest integer: what an op forgets to write shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)
