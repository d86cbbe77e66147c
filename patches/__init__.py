"""Every change sglang-ext makes to SGLang, one module each; `LEDGER` lists them all."""

from __future__ import annotations

from sglang_ext.patches import (
    attention_choices,
    claimed_models,
    context_parallel_moe,
    cpu_defaults,
    cuda_stream,
    cuda_synchronize,
    dead_ranks,
    draft_attention,
    draft_models,
    draft_updates,
    eagle_sampling,
    expert_dispatch,
    expert_load,
    kv_budget,
    last_slot,
    layout_args,
    moe_native,
    padded_head,
    qwen2_capture,
    reasoning_count,
    request_options,
    resting_controller,
    row_headroom,
    speculative_args,
    two_batch_models,
    two_batch_overlap,
    uneven_collectives,
    weight_updates,
    worker_policy,
)
from sglang_ext.patches.hooks import settle
from sglang_ext.patches.ledger import MovedTargetError, Patch, Stage, Where, verify

LEDGER: tuple[Patch, ...] = (
    attention_choices.PATCH,
    attention_choices.DRAFT_PATCH,
    attention_choices.BACKEND_PATCH,
    cpu_defaults.PATCH,
    speculative_args.DRAFT_CHECK_PATCH,
    speculative_args.DSPARK_PATCH,
    speculative_args.DFLASH_PATCH,
    layout_args.PATCH,
    layout_args.LIMIT_PATCH,
    row_headroom.PATCH,
    kv_budget.BEFORE_PATCH,
    kv_budget.PATCH,
    worker_policy.PATCH,
    draft_models.PATCH,
    claimed_models.CONFIG_PATCH,
    claimed_models.WIDTH_PATCH,
    claimed_models.ARGS_PATCH,
    claimed_models.POOL_PATCH,
    claimed_models.SIZE_PATCH,
    claimed_models.MODEL_PATCH,
    moe_native.PATCH,
    last_slot.PATCH,
    eagle_sampling.PATCH,
    eagle_sampling.TREE_PATCH,
    eagle_sampling.TOP_K_PATCH,
    eagle_sampling.TOP_P_PATCH,
    draft_attention.PATCH,
    cuda_synchronize.PATCH,
    uneven_collectives.REDUCE_PATCH,
    uneven_collectives.GATHER_PATCH,
    expert_dispatch.LAYER_PATCH,
    expert_dispatch.DISPATCHER_PATCH,
    expert_load.PATCH,
    cuda_stream.PATCH,
    context_parallel_moe.REJECT_PATCH,
    context_parallel_moe.GATHER_PATCH,
    two_batch_overlap.QWEN_PATCH,
    two_batch_overlap.DEEPSEEK_PATCH,
    two_batch_overlap.MIMO_PATCH,
    two_batch_overlap.QWEN_DECODE_PATCH,
    two_batch_overlap.VERIFY_PATCH,
    two_batch_overlap.FEATURES_PATCH,
    dead_ranks.PEERS_PATCH,
    dead_ranks.CHILDREN_PATCH,
    resting_controller.STAGE_PATCH,
    resting_controller.PATCH,
    two_batch_models.PATCH,
    padded_head.PATCH,
    qwen2_capture.PATCH,
    reasoning_count.PATCH,
    request_options.PATCH,
    weight_updates.DISK_PATCH,
    weight_updates.DISTRIBUTED_PATCH,
    weight_updates.TENSOR_PATCH,
    weight_updates.IPC_PATCH,
    weight_updates.END_PATCH,
    draft_updates.PATCH,
)

_applied: list[Patch] = []


def selected(*, portable_cpu: bool, stage: Stage) -> tuple[Patch, ...]:
    """The entries that apply on this machine at this stage."""
    return tuple(p for p in LEDGER if p.stage is stage and (portable_cpu or p.where is Where.ANY))


def apply_all(*, portable_cpu: bool, stage: Stage = Stage.LAUNCH) -> None:
    """Check every entry of a stage that applies here, then apply those not yet in force."""
    entries = [p for p in selected(portable_cpu=portable_cpu, stage=stage) if p not in _applied]
    verify(entries)
    for patch in entries:
        patch.apply()
        _applied.append(patch)
    settle()


def applied() -> tuple[Patch, ...]:
    """The entries in force in this process, in order."""
    return tuple(_applied)


__all__ = [
    "LEDGER",
    "MovedTargetError",
    "Patch",
    "Stage",
    "applied",
    "apply_all",
    "selected",
    "verify",
]
