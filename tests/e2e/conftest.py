"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from tests.e2e.stand import stand

__all__ = ["stand"]
