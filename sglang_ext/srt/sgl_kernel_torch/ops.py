"""Defines the `torch.ops.sgl_kernel.*` names that SGLang looks up on a CPU.

`convert_weight_packed` must stay undefined: SGLang takes its presence for an Intel AMX build and
then expects some eighty further kernels. The same goes for `fused_qk_norm_cpu` and
`fused_qk_norm_rope_cpu`, whose presence is asked before they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_ext.srt.sgl_kernel_torch import (
    cache_locs,
    delta_rule,
    draft_inputs,
    gates,
    hashing,
    kv_copy,
    norms,
    router,
    tree,
    verify,
)

NAMESPACE = "sgl_kernel"

_SLOT_MOVE = (
    "(Tensor req_pool_indices, {table} req_to_token, Tensor start_offset, Tensor end_offset, "
    "{slots} out_cache_loc, int pool_len) -> ()"
)
_TREE_LINKS = (
    "Tensor(c!) retrive_index, Tensor(d!) retrive_next_token, Tensor(e!) retrive_next_sibling"
)
_SPLIT = (
    "(Tensor mixed_qkvz, Tensor mixed_ba, int num_heads_qk, int num_heads_v, int head_qk, "
    "int head_v) -> (Tensor, Tensor, Tensor, Tensor)"
)
_ROUTE = (
    "(Tensor hidden_states, Tensor gating_output, int topk, bool renormalize, "
    "Tensor? correction_bias=None) -> (Tensor, Tensor)"
)

OPS: dict[str, tuple[str, Callable[..., Any]]] = {
    "assign_req_to_token_pool_cpu": (
        _SLOT_MOVE.format(table="Tensor(a!)", slots="Tensor"),
        cache_locs.assign_req_to_token_pool_cpu,
    ),
    "assign_extend_cache_locs_cpu": (
        _SLOT_MOVE.format(table="Tensor", slots="Tensor(a!)"),
        cache_locs.assign_extend_cache_locs_cpu,
    ),
    "assign_draft_cache_locs_contiguous_cpu": (
        "(Tensor req_pool_indices, Tensor req_to_token, Tensor seq_lens, "
        "Tensor(a!) out_cache_loc, int pool_len, int topk, int num_steps) -> ()",
        cache_locs.assign_draft_cache_locs_contiguous_cpu,
    ),
    "build_draft_decode_metadata_cpu": (
        "(Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, int topk, "
        "int num_steps, int pool_len) -> Tensor",
        cache_locs.build_draft_decode_metadata_cpu,
    ),
    "fill_bonus_tokens_cpu": (
        "(Tensor accept_tokens, Tensor accept_lens, Tensor(a!) bonus_tokens, "
        "int accept_stride) -> ()",
        draft_inputs.fill_bonus_tokens_cpu,
    ),
    "fill_accept_out_cache_loc_cpu": (
        "(Tensor accept_index, Tensor out_cache_loc, Tensor(a!) accept_out_cache_loc) -> ()",
        draft_inputs.fill_accept_out_cache_loc_cpu,
    ),
    "rotate_input_ids_cpu": (
        "(Tensor(a!) input_ids, Tensor extend_start_loc, Tensor extend_seq_lens, "
        "Tensor topk_index, Tensor? select_index=None) -> ()",
        draft_inputs.rotate_input_ids_cpu,
    ),
    "copy_all_layer_kv_cache_cpu": (
        "(Tensor data_ptrs, Tensor strides, Tensor tgt_loc, Tensor src_loc) -> ()",
        kv_copy.copy_all_layer_kv_cache_cpu,
    ),
    "build_tree_kernel_efficient_cpu": (
        "(Tensor parent_list, Tensor selected_index, Tensor verified_seq_len, "
        f"Tensor(a!) tree_mask, Tensor(b!) positions, {_TREE_LINKS}, int topk, int depth, "
        "int draft_token_num, int tree_mask_mode) -> ()",
        tree.build_tree_kernel_efficient_cpu,
    ),
    "reconstruct_indices_from_tree_mask_cpu": (
        f"(Tensor tree_mask, Tensor verified_seq_len, Tensor(b!) positions, {_TREE_LINKS}, "
        "int batch_size, int draft_token_num) -> ()",
        tree.reconstruct_indices_from_tree_mask,
    ),
    "verify_tree_greedy_cpu": (
        "(Tensor(a!) predicts, Tensor(b!) accept_index, Tensor(c!) accept_token_num, "
        "Tensor candidates, Tensor retrive_index, Tensor retrive_next_token, "
        "Tensor retrive_next_sibling, Tensor target_predict) -> ()",
        verify.verify_tree_greedy_cpu,
    ),
    "murmur_hash32_cpu": (
        "(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor",
        hashing.murmur_hash32_cpu,
    ),
    "fused_sigmoid_mul_cpu": (
        "(Tensor(a!) input, Tensor gate) -> ()",
        gates.fused_sigmoid_mul_cpu,
    ),
    "silu_and_mul_cpu": ("(Tensor input) -> Tensor", gates.silu_and_mul_cpu),
    "gelu_and_mul_cpu": ("(Tensor input) -> Tensor", gates.gelu_and_mul_cpu),
    "gelu_tanh_and_mul_cpu": ("(Tensor input) -> Tensor", gates.gelu_tanh_and_mul_cpu),
    "fused_qkvzba_split_reshape_cat_contiguous_cpu": (
        _SPLIT,
        gates.fused_qkvzba_split_reshape_cat_contiguous_cpu,
    ),
    "fused_qkvzba_split_reshape_cat_cpu": (_SPLIT, gates.fused_qkvzba_split_reshape_cat_cpu),
    "rmsnorm_cpu": ("(Tensor input, Tensor weight, float eps) -> Tensor", norms.rmsnorm_cpu),
    "l2norm_cpu": ("(Tensor input, float eps) -> Tensor", norms.l2norm_cpu),
    "fused_rmsnorm_gated_cpu": (
        "(Tensor input, Tensor weight, Tensor gate, float eps) -> Tensor",
        norms.fused_rmsnorm_gated_cpu,
    ),
    "fused_dual_residual_rmsnorm_cpu": (
        "(Tensor x, Tensor residual, Tensor weight1, Tensor weight2, float eps) "
        "-> (Tensor, Tensor)",
        norms.fused_dual_residual_rmsnorm_cpu,
    ),
    "fused_qk_gemma_rmsnorm_cpu": (
        "(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim) "
        "-> (Tensor, Tensor)",
        norms.fused_qk_gemma_rmsnorm_cpu,
    ),
    "fused_qk_gemma_rmsnorm_with_gate_cpu": (
        "(Tensor q_gate, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim, "
        "int num_head) -> (Tensor, Tensor, Tensor)",
        norms.fused_qk_gemma_rmsnorm_with_gate_cpu,
    ),
    "fused_qk_rmsnorm_cpu": (
        "(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps) -> (Tensor, Tensor)",
        norms.fused_qk_rmsnorm_cpu,
    ),
    "fused_qk_rmsnorm_sumsq_cpu": (
        "(Tensor q, Tensor k) -> Tensor",
        norms.fused_qk_rmsnorm_sumsq_cpu,
    ),
    "fused_qk_rmsnorm_apply_from_stats_cpu": (
        "(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor sum_sq, int world_size, "
        "float eps) -> (Tensor, Tensor)",
        norms.fused_qk_rmsnorm_apply_from_stats_cpu,
    ),
    "fused_gdn_gating_cpu": (
        "(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)",
        delta_rule.fused_gdn_gating_cpu,
    ),
    "fused_sigmoid_gating_delta_rule_update_cpu": (
        "(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, "
        "Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, "
        "bool use_qk_l2norm_in_kernel, float softplus_beta=1.0, float softplus_threshold=20.0) "
        "-> Tensor",
        delta_rule.fused_sigmoid_gating_delta_rule_update_cpu,
    ),
    "fused_moe_router_cpu": (
        "(float moe_softcapping, Tensor hidden_states, Tensor gating_output, int topk, "
        "bool renormalize, Tensor? correction_bias=None) -> (Tensor, Tensor)",
        router.fused_moe_router_cpu,
    ),
    "topk_sigmoid_cpu": (_ROUTE, router.topk_sigmoid_cpu),
    "topk_softmax_cpu": (_ROUTE, router.topk_softmax_cpu),
}

# A Library takes its definitions with it when it is collected.
_library: torch.library.Library | None = None


def define_missing_ops() -> tuple[str, ...]:
    """Defines every op of `OPS` that no library has defined yet; returns their names."""
    global _library
    missing = [name for name in OPS if not hasattr(getattr(torch.ops, NAMESPACE), name)]
    if not missing:
        return ()
    _library = _library or torch.library.Library(NAMESPACE, "FRAGMENT")
    for name in missing:
        schema, function = OPS[name]
        _library.define(name + schema)
        _library.impl(name, function, "CPU")
    return tuple(missing)
