"""Builds the package that takes the place of `sgl_kernel` in `sys.modules`.

The package is found by `import`, has the submodules that SGLang imports from, and answers every
unknown name with a function that raises when it is called: SGLang binds many CUDA kernels at
import and calls few of them on a CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn, TypeVar

from sglang_ext.srt.sgl_kernel_torch import (
    cache_locs,
    conv1d,
    delta_rule,
    draft_inputs,
    kv_copy,
    scalar_type,
    tree,
    tree_sampling,
    verify,
)

PACKAGE = "sgl_kernel"
DISTRIBUTION = "sglang-kernel"
PINNED_VERSION = "0.4.10"
F = TypeVar("F", bound=Callable[..., Any])

_EMPTY_SUBMODULES = (
    "allreduce",
    "attention",
    "cutlass_moe",
    "elementwise",
    "expert_specialization",
    "flash_attn",
    "flash_mla",
    "gemm",
    "grammar",
    "infllm_v2",
    "load_utils",
    "memory",
    "moe",
    "quantization",
    "sampling",
    "spatial",
    "top_k",
    "utils",
)


def _unwrapped(function: F | None = None, op_name: str | None = None) -> Any:
    """Stands for the tracing decorator: returns what it is given."""
    if function is None:
        return lambda inner: inner
    return function


_SPECULATIVE: dict[str, Any] = {
    function.__name__: function
    for function in (
        cache_locs.assign_draft_cache_locs_contiguous_cpu,
        cache_locs.assign_extend_cache_locs_cpu,
        cache_locs.assign_req_to_token_pool_cpu,
        cache_locs.build_draft_decode_metadata_cpu,
        draft_inputs.fill_accept_out_cache_loc_cpu,
        draft_inputs.fill_bonus_tokens_cpu,
        draft_inputs.rotate_input_ids_cpu,
        tree.build_tree_kernel_efficient_cpu,
        tree.reconstruct_indices_from_tree_mask,
        tree_sampling.tree_speculative_sampling_target_only,
        verify.verify_tree_greedy_cpu,
    )
}

SUPPLIED: dict[str, dict[str, Any]] = {
    "speculative": _SPECULATIVE,
    "kvcacheio": {"copy_all_layer_kv_cache_cpu": kv_copy.copy_all_layer_kv_cache_cpu},
    "mamba": {
        "causal_conv1d_fn_cpu": conv1d.causal_conv1d_fn_cpu,
        "causal_conv1d_update_cpu": conv1d.causal_conv1d_update_cpu,
        "chunk_gated_delta_rule_cpu": delta_rule.chunk_gated_delta_rule_cpu,
    },
    "scalar_type": {
        "ScalarType": scalar_type.ScalarType,
        "scalar_types": scalar_type.scalar_types,
    },
    "debug_utils": {"maybe_wrap_debug_kernel": _unwrapped},
    **{name: {} for name in _EMPTY_SUBMODULES},
}
_RE_EXPORTED = ("speculative", "kvcacheio", "mamba")


class StandInModule(ModuleType):
    """A module whose unknown public names are functions that raise when called."""

    def __init__(self, name: str, reason: str, members: dict[str, Any]) -> None:
        super().__init__(name, f"Torch stand-in for {name} on a machine without CUDA.")
        is_package = name == PACKAGE
        self.__spec__ = ModuleSpec(name, None, origin="sglang_ext", is_package=is_package)
        if is_package:
            self.__path__ = []
        self.__dict__.update(members)
        self._reason = reason

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        # Python's own probes (__file__, __wrapped__, ...) must see an ordinary module.
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        function = _raising(f"{self.__name__}.{name}", self._reason)
        setattr(self, name, function)
        return function


def _raising(qualified_name: str, reason: str) -> Callable[..., NoReturn]:
    def unavailable(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{qualified_name}: needs the CUDA library {DISTRIBUTION}, which cannot be loaded here "
            f"({reason}), and sglang-ext has no torch version of it. Leave out the option or model "
            "that needs it, or run on a machine with a CUDA GPU."
        )

    unavailable.__name__ = unavailable.__qualname__ = qualified_name.rpartition(".")[2]
    return unavailable


def installed_version() -> str:
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return PINNED_VERSION


def _modules(reason: str) -> Iterator[StandInModule]:
    version = installed_version()
    top: dict[str, Any] = {"__version__": version}
    submodules: dict[str, StandInModule] = {}
    for name, members in {**SUPPLIED, "version": {"__version__": version}}.items():
        submodules[name] = StandInModule(f"{PACKAGE}.{name}", reason, members)
        if name in _RE_EXPORTED:
            top.update(members)
    yield StandInModule(PACKAGE, reason, {**submodules, **top})
    yield from submodules.values()


def put_in_place(reason: str) -> None:
    """Puts the package and its submodules into `sys.modules`."""
    for module in _modules(reason):
        sys.modules[module.__name__] = module


def supplied_functions() -> tuple[str, ...]:
    """Qualified names that have a torch implementation."""
    return tuple(
        sorted(f"{PACKAGE}.{module}.{name}" for module, names in SUPPLIED.items() for name in names)
    )


def lazy_modules() -> tuple[str, ...]:
    """Modules whose other names raise `NotImplementedError` when called."""
    return (PACKAGE, *sorted(f"{PACKAGE}.{name}" for name in SUPPLIED))
