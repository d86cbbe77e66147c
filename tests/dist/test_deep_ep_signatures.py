"""The Buffer's calls take the arguments of `deep_ep.Buffer`, in its order.

The tables are those of deep_ep 2.1.0, `deep_ep/buffers/legacy.py`, written down by hand: a caller
that passes by position or by name must mean the same thing to both.
"""

from __future__ import annotations

import inspect

import pytest

from sglang_ext.srt.parallel.deep_ep_buffer import Buffer

ENDS = ("previous_event", "async_finish", "allocate_on_comm_stream")
LAYOUT = (
    "num_tokens_per_rank",
    "num_tokens_per_rdma_rank",
    "is_token_in_rank",
    "num_tokens_per_expert",
)
ARGUMENTS = {
    "__init__": (
        "group",
        "num_nvl_bytes",
        "num_rdma_bytes",
        "low_latency_mode",
        "num_qps_per_rank",
        "allow_nvlink_for_low_latency_mode",
        "allow_mnnvl",
        "explicitly_destroy",
        "enable_shrink",
        "comm",
    ),
    "get_dispatch_layout": ("topk_idx", "num_experts", *ENDS),
    "dispatch": (
        "x",
        "handle",
        *LAYOUT,
        "topk_idx",
        "topk_weights",
        "expert_alignment",
        "num_worst_tokens",
        "config",
        *ENDS,
    ),
    "combine": ("x", "handle", "topk_weights", "bias", "config", *ENDS),
    "low_latency_dispatch": (
        "x",
        "topk_idx",
        "num_max_dispatch_tokens_per_rank",
        "num_experts",
        "cumulative_local_expert_recv_stats",
        "dispatch_wait_recv_cost_stats",
        "use_fp8",
        "round_scale",
        "use_ue8m0",
        "async_finish",
        "return_recv_hook",
    ),
    "low_latency_combine": (
        "x",
        "topk_idx",
        "topk_weights",
        "handle",
        "use_logfmt",
        "zero_copy",
        "async_finish",
        "return_recv_hook",
        "out",
    ),
    "clean_low_latency_buffer": ("num_max_dispatch_tokens_per_rank", "hidden", "num_experts"),
}
# Those that are not 0, False or None.
DEFAULTS = {
    "__init__": {"num_qps_per_rank": 24, "allow_nvlink_for_low_latency_mode": True},
    "dispatch": {"expert_alignment": 1},
    "low_latency_dispatch": {"use_fp8": True},
}
REQUIRED = {
    "__init__": 1,
    "get_dispatch_layout": 2,
    "dispatch": 1,
    "combine": 2,
    "low_latency_dispatch": 4,
    "low_latency_combine": 4,
    "clean_low_latency_buffer": 3,
}


@pytest.mark.parametrize("call", ARGUMENTS)
def test_a_call_takes_the_arguments_of_deep_ep_in_their_order(call: str) -> None:
    taken = list(inspect.signature(getattr(Buffer, call)).parameters.values())[1:]
    assert [p.name for p in taken] == list(ARGUMENTS[call])
    assert {p.kind for p in taken} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    given = {p.name: p.default for p in taken if p.default is not inspect.Parameter.empty}
    assert list(given) == list(ARGUMENTS[call][REQUIRED[call] :])
    assert {name: v for name, v in given.items() if v} == DEFAULTS.get(call, {})


def test_the_number_of_sms_is_deep_eps() -> None:
    assert Buffer.num_sms == 20
