"""Which implementation of an op answers, decided in one place."""

from __future__ import annotations

import importlib.util
import logging
import os
from functools import cache

import torch

logger = logging.getLogger(__name__)

IMPLEMENTATIONS = ("auto", "torch", "triton")


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _interpreted() -> bool:
    """Triton's interpreter runs kernels on CPU tensors; it is for tests, `auto` ignores it."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _say_once(message: str) -> None:
    logger.warning(message)


def runs_triton(op: str, implementation: str, device: torch.device) -> bool:
    """Whether `op` uses its Triton kernels for tensors on `device`.

    auto takes Triton on CUDA and torch elsewhere. On CUDA without a Triton package it falls back
    to torch and says so once. An implementation asked for by name is used or refused.

    Raises:
        ValueError: an unknown name, or Triton by name where it cannot run.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{op}: implementation: expected one of {', '.join(IMPLEMENTATIONS)}, "
            f"found {implementation!r}"
        )
    if implementation == "torch":
        return False
    able = _has_triton() and (device.type == "cuda" or _interpreted())
    if implementation == "triton" and not able:
        raise ValueError(
            f"{op}: implementation: expected a CUDA device and an installed Triton for 'triton', "
            f"found device {device} and Triton {'present' if _has_triton() else 'absent'}; "
            "use 'auto' or 'torch'"
        )
    if implementation == "triton":
        return True
    if device.type == "cuda" and not able:
        _say_once(f"{op} and other ops run in torch on {device}: no Triton package is installed")
    return device.type == "cuda" and able
