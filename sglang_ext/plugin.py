"""The two functions that SGLang calls in every process it starts.

`activate_platform` runs while `sglang` itself is only partly imported, so it touches nothing of
it; `load` runs once the entry point is up and may import anything. SGLang logs and swallows an
`Exception` from either; what must stop the process therefore leaves as `SystemExit`.
"""

from __future__ import annotations

import os

from sglang_ext import env

PLATFORM_CLASS = "sglang_ext.srt.platform.PortableCpuPlatform"


def _cuda_is_usable() -> bool:
    import torch

    return torch.cuda.is_available()


def wants_portable_cpu() -> bool:
    """Whether this process serves on the CPU through our platform."""
    choice = env.PLATFORM.get()
    if choice == "off":
        return False
    return choice == "cpu" or not _cuda_is_usable()


def activate_platform() -> str | None:
    """Entry point `sglang.srt.platforms`: the class to use, or None to leave SGLang alone."""
    if not wants_portable_cpu():
        return None
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # SGLang decorates small functions with torch.compile. Off CUDA that means a C++ compiler,
    # which a serving machine need not have, and seconds of stall at the first request that
    # reaches one. Read when the decorator runs, so it has to be set now.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    from sglang_ext.srt.sgl_kernel_torch import install

    install()
    return PLATFORM_CLASS


def load() -> None:
    """Entry point `sglang.srt.plugins`: check the ledger, then apply what belongs here."""
    from sglang_ext.patches import apply_all

    apply_all(portable_cpu=wants_portable_cpu())
