"""The portable CPU platform: what SGLang asks of a device, answered for a machine without a GPU.

Imported while `sglang` is half loaded: only `sglang.srt.platforms.*` and torch may be imported at
module level.
"""

from __future__ import annotations

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

ATTENTION_BACKEND = "portable"
ALGORITHMS = ("DFLASH", "DSPARK", "EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")


class PortableCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Eager PyTorch on the CPU: no CUDA, no Triton, no AMX library of SGLang's."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in ALGORITHMS

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == ATTENTION_BACKEND

    def get_speculative_worker_cls(self, algorithm: str) -> type | None:
        from sglang_ext.srt.spec.policy import worker_class

        return worker_class(algorithm)

    def get_compile_backend(self, mode: str | None = None) -> str:
        # Inductor needs a C++ compiler, which a serving machine need not have.
        return "eager"

    def get_group_coordinator_device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def init_backend(self) -> None:
        from sglang_ext.patches import Stage, apply_all
        from sglang_ext.srt.allocator import keep_temporaries

        keep_temporaries()
        apply_all(portable_cpu=True, stage=Stage.BACKEND)

    def post_load_model(self, model: torch.nn.Module) -> None:
        from sglang_ext import env

        if env.FAST_FORWARD.get():
            from sglang_ext.srt.fast_forward import optimise

            optimise(model)

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU
