"""Rules about experts: dispatch, redundancy, balancing, dense layers beside them."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_ext.core.refusals import REFUSALS
from sglang_ext.launcher.view import DISPATCH_VARIABLE, View

# DeepEP's low-latency kernels are compiled for these widths (deep_ep 2.1.0).
LOW_LATENCY_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
LARGEST_DISPATCH = 1024
QUEUE_DEPTH = 1024  # NVSHMEM_QP_DEPTH's default, which must be at least 2 (M + 1)


def fill_redundant(experts: int, ranks: int) -> int:
    """The fewest redundant experts with which every rank holds equally many."""
    return -experts % ranks


def low_latency_is_for_decode(v: View) -> Iterator[tuple[str, str]]:
    if v.a2a == "deepep" and v.text("deepep-mode") == "low_latency" and v.role != "decode":
        yield (
            "DeepEP's low-latency kernels take a bounded number of tokens; a prefill exceeds it.",
            "Use --deepep-mode auto, or serve decode alone (--disaggregation-mode decode).",
        )


def dispatch_fits_the_buffer(v: View) -> Iterator[tuple[str, str]]:
    decodes = v.role != "prefill" and v.text("deepep-mode", "auto") != "normal"
    if v.a2a != "deepep" or not decodes:
        return
    if not v.has("max-running-requests"):
        yield (
            "the largest decode batch is not known, DeepEP's buffer is of fixed size.",
            "Set --max-running-requests.",
        )
        return
    # Graphs included: SGLang captures, and warms up, no larger batch than may run.
    rows = v.running_per_rank * (v.draft_tokens + 1)
    if rows > v.dispatch_limit:
        yield (
            f"{v.running_per_rank} requests per rank x {v.draft_tokens + 1} rows = {rows} tokens, "
            f"{DISPATCH_VARIABLE} is {v.dispatch_limit}.",
            f"Set {DISPATCH_VARIABLE}={rows} (at most {LARGEST_DISPATCH}), or lower "
            "--max-running-requests or the draft's block.",
        )


def dispatch_buffer_is_possible(v: View) -> Iterator[tuple[str, str]]:
    if v.a2a != "deepep":
        return
    limit = v.dispatch_limit
    if limit > LARGEST_DISPATCH:
        yield (
            f"{DISPATCH_VARIABLE}={limit} is above DeepEP's {LARGEST_DISPATCH}.",
            "Lower it, and --max-running-requests with it.",
        )
    depth = v.variable("NVSHMEM_QP_DEPTH", QUEUE_DEPTH)
    if depth < 2 * (limit + 1):
        yield (
            f"NVSHMEM's queues hold {depth} entries, {limit} tokens need {2 * (limit + 1)}.",
            f"Set NVSHMEM_QP_DEPTH={1 << (2 * limit + 1).bit_length()}.",
        )


def deepep_can_carry_the_model(v: View) -> Iterator[tuple[str, str]]:
    if v.a2a != "deepep":
        return
    if not v.experts:
        yield "the model has no experts to dispatch to.", "Drop --moe-a2a-backend."
        return
    if v.on_cpu:
        return
    if not v.is_quantized:
        yield (
            "SGLang's DeepEP path computes experts in fp8 or fp4; these are unquantized.",
            "Use --ep-size without an all-to-all backend, or an fp8 checkpoint.",
        )
    if int(v.config["hidden_size"]) not in LOW_LATENCY_HIDDEN:
        yield (
            f"DeepEP has no low-latency kernel for width {v.config['hidden_size']}.",
            "Use --moe-a2a-backend none.",
        )


def all_to_all_spans_the_group(v: View) -> Iterator[tuple[str, str]]:
    if v.a2a != "none" and v.has("ep-size") and v.whole("ep-size") != v.sizes.tp:
        yield (
            f"--moe-a2a-backend {v.a2a} spreads experts over all {v.sizes.tp} ranks.",
            f"Use --ep-size {v.sizes.tp}.",
        )


def experts_divide(v: View) -> Iterator[tuple[str, str]]:
    redundant = v.whole("ep-num-redundant-experts", 0)
    if not v.experts:
        if v.sizes.ep > 1:
            yield "the model has no experts to spread.", "Drop --ep-size."
        return
    if (v.experts + redundant) % v.sizes.ep:
        fewest = fill_redundant(v.experts, v.sizes.ep)
        yield (
            f"{v.experts} experts and {redundant} redundant ones do not fill {v.sizes.ep} ranks "
            "evenly.",
            f"Use --ep-num-redundant-experts {fewest} or {fewest + v.sizes.ep}: "
            f"(ep - E mod ep) mod ep, plus multiples of {v.sizes.ep}.",
        )
    width = int(v.config["moe_intermediate_size"])
    if width % v.moe_tp or (v.is_quantized and width // v.moe_tp % 128):
        unit = " of whole 128-wide scale blocks" if v.is_quantized else ""
        yield (
            f"an expert's {width} columns do not split into {v.moe_tp} slices{unit}.",
            "Raise --ep-size.",
        )


def balancing_sees_the_dispatch(v: View) -> Iterator[tuple[str, str]]:
    if not v.has("enable-eplb"):
        return
    if v.a2a == "deepep" and v.text("deepep-mode", "auto") != "normal" and not v.on_cpu:
        yield (
            "the load recorder follows one dispatch mode, and in auto it cannot tell which.",
            "Use --deepep-mode normal.",
        )
    if v.sizes.ep == 1:
        yield "there is one expert rank, nothing to balance.", "Raise --ep-size."
    every = v.whole("eplb-rebalance-num-iterations", 1000)
    buffer = v.whole("expert-distribution-recorder-buffer-size", every)
    if every < buffer:
        yield (
            f"experts move every {every} passes, the recorder wants {buffer}.",
            f"Use --expert-distribution-recorder-buffer-size {every}.",
        )


def balancing_stays_in_a_stage(v: View) -> Iterator[tuple[str, str]]:
    if v.has("enable-eplb") and v.sizes.pp > 1 and not v.on_cpu:
        refusal = REFUSALS["eplb with stages"]
        yield refusal.reason(f"--pp-size {v.sizes.pp}"), refusal.remedy


def dense_layers_follow_the_head(v: View) -> Iterator[tuple[str, str]]:
    if not v.has("moe-dense-tp-size"):
        return
    size = v.whole("moe-dense-tp-size")
    if size not in (1, v.sizes.tp):
        yield (
            f"dense layers can be whole on each rank or split over all {v.sizes.tp}, not {size}.",
            "Use --moe-dense-tp-size 1.",
        )
    if size == 1 and v.sizes.dp > 1 and not v.has("enable-dp-lm-head"):
        yield (
            "whole dense layers leave each group its own rows, a split head gathers all.",
            "Add --enable-dp-lm-head.",
        )


EXPERT_RULES = (
    low_latency_is_for_decode,
    dispatch_fits_the_buffer,
    dispatch_buffer_is_possible,
    deepep_can_carry_the_model,
    all_to_all_spans_the_group,
    experts_divide,
    balancing_sees_the_dispatch,
    balancing_stays_in_a_stage,
    dense_layers_follow_the_head,
)
