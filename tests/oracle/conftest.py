"""Fixtures of the tests against HF transformers; servers are shared with the end-to-end tests."""

from __future__ import annotations

import torch

from tests.e2e.stand import stand

__all__ = ["stand"]

# One thread, as the servers have: sums are then taken in the same order more often.
torch.set_num_threads(1)
