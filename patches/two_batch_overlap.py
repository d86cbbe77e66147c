"""`--enable-two-batch-overlap` without CUDA, and with verifications of DSPARK, DFLASH and NEXTN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.patches.hooks import hook
from sglang_ext.patches.ledger import Kind, Patch, Stage, Where

_MODULE = "sglang.srt.batch_overlap.operations_strategy"
_SPLIT = "sglang.srt.batch_overlap.two_batch_overlap"
_MODEL = "sglang.srt.models.qwen2_moe"
_SOURCE = "https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/"


def _strategy(layer: Any) -> Any:
    from sglang_ext.srt.parallel.two_batch import prefill_strategy

    return prefill_strategy(layer)


def _qwen_prefill(layer: Any) -> Any:
    from sglang_ext.srt.parallel.two_batch import keeping_features, prefill_strategy

    return keeping_features(prefill_strategy(layer), layer)


def _qwen_decode(original: Callable[..., Any], layer: Any) -> Any:
    from sglang_ext.srt.parallel.seen import note
    from sglang_ext.srt.parallel.two_batch import keeping_features

    note("two-batch split of a decode")
    return keeping_features(original(layer), layer)


def _prepare(
    original: Callable[..., None], preparer: Any, batch: Any, is_draft_worker: bool = False
) -> None:
    from sglang_ext.srt.parallel.two_batch import note_prefill
    from sglang_ext.srt.parallel.two_batch_verify import split, verifies_chains

    if not is_draft_worker and verifies_chains(batch):
        split(batch)
        return
    original(preparer, batch, is_draft_worker)
    note_prefill(batch)


def _with_features(
    original: Callable[..., Any],
    model: Any,
    input_ids: Any,
    positions: Any,
    forward_batch: Any,
    input_embeds: Any = None,
    pp_proxy_tensors: Any = None,
) -> Any:
    from sglang_ext.srt.parallel.two_batch import features_of_halves

    hidden = original(model, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
    if not forward_batch.can_run_tbo or not model.layers_to_capture:
        return hidden
    return hidden, features_of_halves(forward_batch)


def _patch(
    function: str, replacement: Callable[..., Any], kind: Kind, why: str, until: str
) -> Patch:
    return Patch(
        name=f"two-batch{function.removeprefix('_compute_moe').replace('_', '-')}",
        target=f"{_MODULE}:{function}",
        kind=kind,
        where=Where.CPU,
        stage=Stage.BACKEND,
        why=why,
        upstream=f"{_SOURCE}batch_overlap/operations_strategy.py",
        signature="(layer)",
        until=until,
        apply=lambda: hook(f"{_MODULE}.{function}", replacement, kind),
    )


_SMS = "the prefill schedule reads CUDA device properties to reserve SMs for communication"
_PLATFORM = "the strategies ask the platform for SM counts"
_CAPTURES = "the staged forward captures layer inputs as the plain one does"
_KEEP = (
    "the log says once that decode batches were split, and the layer inputs that a draft reads are "
    "kept, which SGLang does in a forward of one batch only"
)

QWEN_PATCH = _patch(
    "_compute_moe_qwen3_prefill",
    _qwen_prefill,
    Kind.REPLACE,
    f"{_SMS}; {_KEEP}",
    f"{_PLATFORM}; {_CAPTURES}",
)
DEEPSEEK_PATCH = _patch(
    "_compute_moe_deepseek_blog_prefill", _strategy, Kind.REPLACE, _SMS, _PLATFORM
)
MIMO_PATCH = _patch("_compute_moe_mimov2_prefill", _strategy, Kind.REPLACE, _SMS, _PLATFORM)
QWEN_DECODE_PATCH = _patch("_compute_moe_qwen3_decode", _qwen_decode, Kind.AROUND, _KEEP, _CAPTURES)

VERIFY_PATCH = Patch(
    name="two-batch-verify",
    target=f"{_SPLIT}:TboForwardBatchPreparer.prepare",
    kind=Kind.AROUND,
    where=Where.CPU,
    stage=Stage.BACKEND,
    why="it cuts a verification between requests of one width and splits tree fields of EAGLE; "
    "a chain has no tree, may have a width of its own, and may be cut inside; the log says once "
    "how prefills were cut",
    upstream=f"{_SOURCE}batch_overlap/two_batch_overlap.py",
    signature="(batch: 'ForwardBatch', is_draft_worker: 'bool' = False)",
    until="the split reads rows per request from the speculative input",
    apply=lambda: hook(f"{_SPLIT}.TboForwardBatchPreparer.prepare", _prepare, Kind.AROUND),
)

FEATURES_PATCH = Patch(
    name="two-batch-features",
    target=f"{_MODEL}:Qwen2MoeModel.forward",
    kind=Kind.AROUND,
    where=Where.CPU,
    stage=Stage.BACKEND,
    why="a forward in two halves returns no layer inputs, and drafts are made of them",
    upstream=f"{_SOURCE}models/qwen2_moe.py",
    signature="(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: "
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch, input_embeds: torch.Tensor = None, "
    "pp_proxy_tensors: Optional[sglang.srt.model_executor.forward_batch_info.PPProxyTensors] = "
    "None) -> Union[torch.Tensor, "
    "sglang.srt.model_executor.forward_batch_info.PPProxyTensors]",
    until=_CAPTURES,
    apply=lambda: hook(f"{_MODEL}.Qwen2MoeModel.forward", _with_features, Kind.AROUND),
)
