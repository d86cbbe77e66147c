"""What holds for all tests."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import settings

# How long an example takes depends on what else the machine does; benchmarks time, tests do not.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _plain_properties(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test records crosses processes: a tensor there would end the whole test process."""
    yield
    json.dumps(request.node.user_properties)
