"""Rotary position embedding on tables prepared once per model and gathered once per forward."""

from sglang_ext.kernels.rope.api import RotaryTables, rotate

__all__ = ["RotaryTables", "rotate"]
