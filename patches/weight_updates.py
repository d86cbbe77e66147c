"""After weights were replaced over RPC, packed copies of them are made again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.patches.hooks import hook
from sglang_ext.patches.ledger import Kind, Patch, Stage, Where

_MODULE = "sglang.srt.model_executor.model_runner_components.weight_updater"


def _then_pack(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang_ext.srt.fast_forward import refresh

    # Also after a failure: SGLang may have written some of the weights by then.
    try:
        return original(updater, *args, **kwargs)
    finally:
        refresh(updater.get_model())


def _patch(method: str, signature: str) -> Patch:
    return Patch(
        name=f"repack-after-{method.replace('_', '-')}",
        target=f"{_MODULE}:WeightUpdater.{method}",
        kind=Kind.AROUND,
        where=Where.CPU,
        stage=Stage.BACKEND,
        why="packed copies of the weights would keep their old values",
        upstream="https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/"
        "model_executor/model_runner_components/weight_updater.py",
        signature=signature,
        until="the platform is told when weights change",
        apply=lambda: hook(f"{_MODULE}.WeightUpdater.{method}", _then_pack, Kind.AROUND),
    )


DISK_PATCH = _patch(
    "update_weights_from_disk",
    "(self: 'WeightUpdater', model_path: 'str', load_format: 'str', "
    "weight_name_filter: 'Optional[Callable[[str], bool]]' = None, "
    "recapture_cuda_graph: 'bool' = False) -> 'tuple[bool, str]'",
)
DISTRIBUTED_PATCH = _patch(
    "load_weights_from_distributed",
    "(self: 'WeightUpdater', named_tensors: 'List[Tuple[str, torch.Tensor]]') "
    "-> 'Tuple[bool, str]'",
)
TENSOR_PATCH = _patch(
    "update_weights_from_tensor",
    "(self: 'WeightUpdater', named_tensors: "
    "'List[Tuple[str, Union[torch.Tensor, LocalSerializedTensor]]]', "
    "load_format: 'Optional[str]' = None)",
)
IPC_PATCH = _patch("update_weights_from_ipc", "(self: 'WeightUpdater', recv_req)")
END_PATCH = _patch(
    "end_weight_update", "(self: 'WeightUpdater', *, run_post_load: 'bool') -> 'None'"
)
