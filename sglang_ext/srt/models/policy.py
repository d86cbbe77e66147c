"""Whose model files answer for DeepSeek-V4 and V3.2 on a machine (SGLANG_EXT_MODELS)."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from functools import cache
from typing import Literal

logger = logging.getLogger(__name__)

# SGLang's files call FlashMLA and DeepGEMM, whose kernels begin at this compute capability.
LEAST_CAPABILITY = (9, 0)
LIBRARIES = ("sgl_kernel", "flash_mla", "deep_gemm")


@dataclass(frozen=True)
class Machine:
    """What decides where a model runs.

    device: portable (our CPU platform), cuda (NVIDIA), other (SGLang's own platforms).
    capability: the smallest compute capability of the GPUs that this process sees.
    missing: those of `LIBRARIES` that are not installed.
    """

    device: Literal["portable", "cuda", "other"]
    capability: tuple[int, int] | None = None
    missing: tuple[str, ...] = ()


def builtin_refusal(machine: Machine) -> str | None:
    """Why SGLang 0.5.23's own files cannot run on a machine; None where they can."""
    if machine.device == "portable":
        return "SGLang's files need CUDA"
    if machine.device == "other":
        return None
    if machine.capability is not None and machine.capability < LEAST_CAPABILITY:
        least, found = (
            f"{major}.{minor}" for major, minor in (LEAST_CAPABILITY, machine.capability)
        )
        return f"SGLang's files need compute capability {least}, and a GPU here has {found}"
    if machine.missing:
        return f"SGLang's files need {', '.join(machine.missing)}, not installed here"
    return None


def ours(choice: str, machine: Machine) -> bool:
    """Whether this package serves the models. choice: auto, always or never."""
    if choice == "auto":
        return builtin_refusal(machine) is not None
    return choice == "always"


def reason(choice: str, machine: Machine) -> str:
    """One clause for the log and the doctor."""
    if choice != "auto":
        return f"SGLANG_EXT_MODELS={choice}"
    return builtin_refusal(machine) or "SGLang's files can run here"


@cache
def this_machine() -> Machine:
    """The machine that this process runs on; looked at once."""
    from sglang_ext.plugin import wants_portable_cpu

    if wants_portable_cpu():
        return Machine("portable")
    import torch

    if not torch.cuda.is_available() or torch.version.cuda is None:
        return Machine("other")
    gpus = range(torch.cuda.device_count())
    missing = tuple(name for name in LIBRARIES if importlib.util.find_spec(name) is None)
    return Machine("cuda", min(torch.cuda.get_device_capability(gpu) for gpu in gpus), missing)


@cache
def say_once(title: str, who: str, why: str) -> None:
    """Log whose files serve a model."""
    logger.info("%s is served by %s: %s", title, who, why)
