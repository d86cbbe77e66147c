"""Combinations of parallel flags that cannot be exact on a machine without a GPU.

The one source of the refusals at start-up, of the launcher's, and of the table in docs/layouts.md.
Each is refused by a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

STAGES = "the draft reads layers that other stages hold"


@dataclass(frozen=True)
class Refusal:
    """A combination of flags that ends the start.

    flag: what is at fault; beside: what it does not go with; why; remedy
    """

    flag: str
    beside: str
    why: str
    remedy: str

    def reason(self, found: object) -> str:
        return (
            f"{self.flag}: expected not to be given {self.beside}, found {found}. "
            f"{self.why[0].upper()}{self.why[1:]}."
        )

    def message(self, found: object) -> str:
        return f"{self.reason(found)} {self.remedy}"


REFUSALS: dict[str, Refusal] = {
    "two-batch without exchange": Refusal(
        "--enable-two-batch-overlap",
        "without --moe-a2a-backend deepep",
        "the halves meet at the expert exchange, and SGLang's gather for all ranks has no size "
        "for half a batch",
        "Add --moe-a2a-backend deepep, or leave it out: on a CPU it changes no speed.",
    ),
    "two-batch with cp": Refusal(
        "--enable-two-batch-overlap",
        "with --attn-cp-size",
        "the halves of a batch carry no context-parallel split",
        "Leave one of them out.",
    ),
    "two-batch with low latency": Refusal(
        "--enable-two-batch-overlap",
        "on a CPU with --moe-a2a-backend deepep in another mode than normal",
        "halves that meet in slots have not been held to one rank",
        "Add --deepep-mode normal.",
    ),
    "two-batch with mixed chunk": Refusal(
        "--enable-two-batch-overlap",
        "with --enable-mixed-chunk",
        "SGLang cuts a batch by prompts or by decoding requests, and such a batch has both",
        "Leave one of them out.",
    ),
    "two-batch with speculation": Refusal(
        "--enable-two-batch-overlap",
        "with --speculative-algorithm, but for DSPARK and DFLASH on Qwen3-MoE, DeepSeek-V3.2 and "
        "DeepSeek-V4, and NEXTN on the last",
        "other verifications have not been held to one rank in halves, and other models keep no "
        "layer inputs of a half for a draft",
        "Leave one of them out.",
    ),
    "single-batch without exchange": Refusal(
        "--enable-single-batch-overlap",
        "on a CPU without --moe-a2a-backend deepep",
        "it overlaps the expert exchange with the experts, and there is none",
        "Add --moe-a2a-backend deepep, or leave it out.",
    ),
    "single-batch with two-batch": Refusal(
        "--enable-single-batch-overlap",
        "on a CPU with --enable-two-batch-overlap",
        "batches of both kinds in one run have not been held to one rank",
        "Leave one of them out.",
    ),
    "single-batch of other models": Refusal(
        "--enable-single-batch-overlap",
        "on a CPU with another model than Qwen3-MoE, DeepSeek-V3.2 and DeepSeek-V4",
        "SGLang's other models overlap on CUDA streams, or not at all",
        "Leave it out.",
    ),
    "single-batch with cp": Refusal(
        "--enable-single-batch-overlap",
        "on a CPU with --attn-cp-size",
        "an exchange that is overlapped within a split prefill has not been held to one rank",
        "Leave one of them out.",
    ),
    "eplb with overlap": Refusal(
        "--enable-eplb",
        "on a CPU with --enable-two-batch-overlap or --enable-single-batch-overlap",
        "experts that move between overlapped batches have not been held to one rank",
        "Leave one of them out.",
    ),
    "eplb with cp": Refusal(
        "--enable-eplb",
        "on a CPU with --attn-cp-size",
        "experts that move between split prefills have not been held to one rank",
        "Leave one of them out.",
    ),
    "eplb with stages": Refusal(
        "--enable-eplb",
        "with --pp-size",
        "SGLang counts the ranks of a stage from 0 and sends experts by that number among all "
        "ranks: the first rebalance waits for a rank that sends elsewhere",
        "Leave one of them out.",
    ),
    "eplb with low latency": Refusal(
        "--enable-eplb",
        "with --moe-a2a-backend deepep in another mode than normal",
        "SGLang counts the load of experts in one mode at a time",
        "Add --deepep-mode normal.",
    ),
    "exchange": Refusal(
        "--moe-a2a-backend",
        "on a CPU with another value than none or deepep",
        "the other exchanges are CUDA libraries",
        "Use --moe-a2a-backend deepep, which runs over torch.distributed here.",
    ),
    "cp backend": Refusal(
        "--enable-prefill-cp",
        "on a CPU with another backend than 'portable', or latent K/V of a model that SGLang loads",
        "keys and values must be gathered before they are written, which only ours do",
        "Leave out --enable-prefill-cp, or --attention-backend.",
    ),
    "decode cp": Refusal(
        "--dcp-size",
        "on a CPU",
        "no attention backend here reads K/V that are spread over ranks",
        "Use --attn-cp-size with --enable-prefill-cp for prefill, --attn-dp-size for decode.",
    ),
    "moe dp": Refusal(
        "--moe-dp-size",
        "on a CPU",
        "its results have not been held to those of one rank",
        "Use --ep-size, or --moe-a2a-backend deepep.",
    ),
    "pipeline with overlap": Refusal(
        "--pp-size",
        "on a CPU with --enable-two-batch-overlap or --enable-single-batch-overlap",
        "overlapped batches that pass through stages have not been held to one rank",
        "Leave one of them out.",
    ),
    "pipeline with cp": Refusal(
        "--pp-size",
        "on a CPU with --attn-cp-size",
        "split prefills that pass through stages have not been held to one rank",
        "Leave one of them out.",
    ),
    "pipeline with speculation": Refusal(
        "--pp-size",
        "with DSPARK or DFLASH",
        STAGES,
        "Leave it out.",
    ),
}


@dataclass(frozen=True)
class LayoutFlags:
    """Flags of a launch that decide whether it is refused, under SGLang's names for them."""

    enable_two_batch_overlap: bool = False
    enable_single_batch_overlap: bool = False
    enable_mixed_chunk: bool = False
    enable_eplb: bool = False
    moe_a2a_backend: str = "none"
    deepep_mode: str = "auto"
    attn_cp_size: int = 1
    dcp_size: int = 1
    moe_dp_size: int = 1
    pp_size: int = 1

    @property
    def splits_prefills(self) -> bool:
        return self.attn_cp_size > 1

    @property
    def exchanges(self) -> bool:
        return self.moe_a2a_backend != "none"

    @property
    def has_slots(self) -> bool:
        """Whether rows are exchanged in low-latency mode, in some steps at least."""
        return self.moe_a2a_backend == "deepep" and self.deepep_mode != "normal"

    @property
    def mode(self) -> str:
        return f"--deepep-mode {self.deepep_mode}"

    @property
    def overlap(self) -> str:
        """The flag that overlaps batches; empty where none does."""
        if self.enable_two_batch_overlap:
            return "--enable-two-batch-overlap"
        return "--enable-single-batch-overlap" if self.enable_single_batch_overlap else ""

    @property
    def cp(self) -> str:
        return f"--attn-cp-size {self.attn_cp_size}"

    @property
    def exchange(self) -> str:
        return f"--moe-a2a-backend {self.moe_a2a_backend}"


# refusal -> (when it applies, what was found)
_WHEN: dict[str, tuple[Callable[[LayoutFlags], bool], Callable[[LayoutFlags], object]]] = {
    "two-batch without exchange": (
        lambda f: f.enable_two_batch_overlap and not f.exchanges,
        lambda f: f.exchange,
    ),
    "two-batch with cp": (
        lambda f: f.enable_two_batch_overlap and f.splits_prefills,
        lambda f: f.cp,
    ),
    "two-batch with low latency": (
        lambda f: f.enable_two_batch_overlap and f.has_slots,
        lambda f: f.mode,
    ),
    "two-batch with mixed chunk": (
        lambda f: f.enable_two_batch_overlap and f.enable_mixed_chunk,
        lambda f: "--enable-mixed-chunk",
    ),
    "single-batch without exchange": (
        lambda f: f.enable_single_batch_overlap and not f.exchanges,
        lambda f: f.exchange,
    ),
    "single-batch with two-batch": (
        lambda f: f.enable_single_batch_overlap and f.enable_two_batch_overlap,
        lambda f: "both",
    ),
    "single-batch with cp": (
        lambda f: f.enable_single_batch_overlap and f.splits_prefills,
        lambda f: f.cp,
    ),
    "eplb with overlap": (lambda f: f.enable_eplb and bool(f.overlap), lambda f: f.overlap),
    "eplb with cp": (lambda f: f.enable_eplb and f.splits_prefills, lambda f: f.cp),
    "eplb with low latency": (
        lambda f: f.enable_eplb and f.has_slots,
        lambda f: f.mode,
    ),
    "eplb with stages": (
        lambda f: f.enable_eplb and f.pp_size > 1,
        lambda f: f"--pp-size {f.pp_size}",
    ),
    "exchange": (
        lambda f: f.moe_a2a_backend not in ("none", "deepep"),
        lambda f: f.moe_a2a_backend,
    ),
    "decode cp": (lambda f: f.dcp_size > 1, lambda f: f.dcp_size),
    "moe dp": (lambda f: f.moe_dp_size > 1, lambda f: f.moe_dp_size),
    "pipeline with overlap": (lambda f: f.pp_size > 1 and bool(f.overlap), lambda f: f.overlap),
    "pipeline with cp": (lambda f: f.pp_size > 1 and f.splits_prefills, lambda f: f.cp),
}


def refused(flags: LayoutFlags) -> Iterator[tuple[Refusal, object]]:
    """The refusals of a launch on a CPU that its flags alone decide, each with what was found."""
    for name, (applies, found) in _WHEN.items():
        if applies(flags):
            yield REFUSALS[name], found(flags)
