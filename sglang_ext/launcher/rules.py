"""Which launches cannot work, or would quietly work badly, and which flag to change.

SGLang resolves most of these itself, after minutes of loading or not at all; each rule here says
the reason before anything starts. A rule is a function of a `View` that yields findings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Literal

from sglang_ext.core.layout import LayoutError, ParallelLayout
from sglang_ext.core.refusals import LayoutFlags, refused
from sglang_ext.launcher.compose import Launch
from sglang_ext.launcher.errors import ConfigError
from sglang_ext.launcher.rules_experts import EXPERT_RULES
from sglang_ext.launcher.rules_speculation import NEXTN, OURS, SPECULATION_RULES
from sglang_ext.launcher.view import View

Complaints = Iterator[tuple[str, str]]


@dataclass(frozen=True)
class Finding:
    """What one rule says about a launch.

    level: an `error` stops it, a `note` is printed; reason: why; remedy: the flag to change
    """

    rule: str
    level: Literal["error", "note"]
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.reason} {self.remedy}"


def layout_is_legal(v: View) -> Complaints:
    try:
        ParallelLayout(**vars(v.sizes))
    except LayoutError as error:
        broken = "; ".join(rule.text for rule in error.rules)
        yield f"{v.sizes} is no layout: {broken}.", f"Nearest: {' '.join(error.nearest.flags())}."


def replicas_stand_alone(v: View) -> Complaints:
    if v.replicas > 1 and v.sizes.dp > 1:
        yield (
            f"--dp-size {v.replicas} makes whole replicas, --attn-dp-size {v.sizes.dp} groups "
            "inside one server; SGLang does not combine them.",
            "Keep one of the two.",
        )
    if v.replicas > 1 and v.sizes.nnodes > 1:
        yield (
            "replicas (--dp-size) do not span nodes.",
            "Start one server per node, or use --attn-dp-size.",
        )


def every_gpu_has_a_rank(v: View) -> Complaints:
    used, there = v.sizes.world * v.replicas, v.launch.hardware.gpus
    if not v.on_cpu and used != there:
        yield (
            f"tp {v.sizes.tp} x pp {v.sizes.pp} x replicas {v.replicas} = {used} ranks, "
            f"{v.launch.hardware.name} has {there} GPUs.",
            "Change --tp-size or --dp-size.",
        )


def heads_divide(v: View) -> Complaints:
    heads = int(v.config["num_attention_heads"])
    if heads % v.attn_tp:
        yield (
            f"{heads} attention heads do not split over {v.attn_tp} ranks.",
            "Raise --attn-dp-size or lower --tp-size.",
        )
    groups = int(v.config.get("o_groups", v.attn_tp))
    if v.is_v4 and groups % v.attn_tp:
        yield (
            f"{groups} output groups do not split over {v.attn_tp} ranks.",
            f"Raise --attn-dp-size until tp / attn-dp is at most {groups}.",
        )


def gpu_can_compute_it(v: View) -> Complaints:
    gpu = v.launch.hardware.gpu
    if v.on_cpu:
        return
    if v.is_quantized and not gpu.fp8:
        yield (
            f"{v.launch.model.name} is stored in fp8, which {gpu.name} cannot multiply.",
            "Use Hopper or later, or a bf16 checkpoint.",
        )
    elif (v.is_v4 or v.is_v32) and gpu.capability < (9, 0):
        yield (
            f"SGLang's sparse attention kernels need compute capability 9.0, {gpu.name} has "
            f"{gpu.capability[0]}.{gpu.capability[1]}.",
            "Use Hopper or later.",
        )


def context_parallel_limits(v: View) -> Complaints:
    if v.sizes.cp == 1 and not v.has("enable-prefill-cp"):
        return
    strategy = v.text("cp-strategy")
    if not v.has("enable-prefill-cp") or strategy not in ("zigzag", "interleave"):
        yield (
            "context parallelism needs --enable-prefill-cp and a --cp-strategy.",
            "Add both: --enable-prefill-cp --cp-strategy interleave.",
        )
    if v.on_cpu:
        # What follows is about SGLang's own DeepSeek models, which need CUDA.
        return
    if (v.is_v4 or v.is_v32) and strategy == "zigzag":
        yield (
            f"{v.launch.model.name} reindexes its sparse keys in interleaved order.",
            "Use --cp-strategy interleave.",
        )
    if (v.is_v4 or v.is_v32) and v.sizes.tp > 8:
        yield (
            "sparse attention's context parallelism loses precision across machines; SGLang "
            f"allows tp up to 8, found {v.sizes.tp}.",
            "Use one node per server.",
        )
    if v.is_v4 and (v.sizes.dp > 1 or v.sizes.cp != v.sizes.tp):
        yield (
            "DeepSeek-V4 gives the whole tp group to context parallelism.",
            f"Use --attn-cp-size {v.sizes.tp} and no --attn-dp-size.",
        )


def overlap_limits(v: View) -> Complaints:
    if v.has("enable-two-batch-overlap"):
        yield from _two_batches(v)
    if v.has("enable-single-batch-overlap"):
        if v.a2a != "deepep" and not v.on_cpu:
            yield (
                "single-batch overlap hides DeepEP's dispatch; there is none.",
                "Add --moe-a2a-backend deepep, or drop --enable-single-batch-overlap.",
            )
        if v.launch.hardware.gpu.capability[0] == 9:
            yield (
                "SGLang's fp8 kernels overlap inside a batch on no GPU of compute capability 9.x, "
                f"and {v.launch.hardware.gpu.name} is one.",
                "Drop --enable-single-batch-overlap, or use Blackwell.",
            )
        if v.on_cpu and v.architecture == "Qwen3MoeForCausalLM":
            return
        if not (v.is_v32 or (v.on_cpu and v.is_v4)):
            yield (
                f"only SGLang's DeepSeek-V3 code overlaps inside a batch, {v.architecture} does "
                "not.",
                "Drop --enable-single-batch-overlap.",
            )


def _two_batches(v: View) -> Complaints:
    drop = "Drop --enable-two-batch-overlap."
    if v.sizes.cp > 1 and not v.on_cpu:
        yield "the halves of a two-batch overlap carry no context-parallel plan.", drop
    if not v.experts:
        yield "two-batch overlap hides the exchange between experts; there are none.", drop
    elif v.a2a == "none" and not v.on_cpu and not (v.is_v4 and v.sizes.dp > 1):
        yield (
            "without an all-to-all backend there is nothing to overlap.",
            ("Add --moe-a2a-backend deepep, or drop --enable-two-batch-overlap."),
        )
    if v.a2a == "deepep_v2":
        yield "deepep_v2 has no hooks for overlap.", "Use --moe-a2a-backend deepep."
    if v.on_cpu:
        model = v.is_v4 or v.is_v32 or v.architecture == "Qwen3MoeForCausalLM"
        cut = (model and v.algorithm in OURS) or (v.is_v4 and v.algorithm in NEXTN)
        if v.algorithm and not cut:
            yield f"verifications of {v.algorithm} are not cut in halves for this model.", drop
    elif v.is_v4 and v.algorithm:
        yield "DeepSeek-V4 splits a verification batch into a half with no tokens.", drop


def what_a_cpu_refuses(v: View) -> Complaints:
    """What the server itself would refuse, in its words, before it is started."""
    if not v.on_cpu:
        return
    given = {
        field.name: v.flags[flag]
        for field in fields(LayoutFlags)
        if v.flags.get(flag := field.name.replace("_", "-")) is not None
    }
    for refusal, found in refused(LayoutFlags(**given)):
        yield refusal.reason(found), refusal.remedy


def lm_head_follows_attention(v: View) -> Complaints:
    if v.has("enable-dp-lm-head") and v.sizes.dp == 1:
        yield (
            "--enable-dp-lm-head needs data-parallel attention.",
            "Add --attn-dp-size, or drop --enable-dp-lm-head.",
        )


def memory_share_is_a_share(v: View) -> Complaints:
    share = v.flags.get("mem-fraction-static")
    if share is not None and not (isinstance(share, int | float) and 0 < share < 1):
        yield f"--mem-fraction-static {share} is no share of memory.", "Use a number below 1."


def pipeline_limits(v: View) -> Complaints:
    if v.sizes.pp == 1 or not v.algorithm:
        return
    if v.algorithm not in ("DSPARK", *NEXTN) or (v.on_cpu and v.algorithm in OURS):
        yield f"{v.algorithm} does not draft over pipeline stages.", "Use --pp-size 1."
    elif v.role != "prefill":
        yield (
            f"{v.algorithm} over pipeline stages is for the prefill half of a split deployment.",
            "Use --pp-size 1.",
        )


ERRORS: tuple[Callable[[View], Complaints], ...] = (
    layout_is_legal,
    replicas_stand_alone,
    every_gpu_has_a_rank,
    heads_divide,
    gpu_can_compute_it,
    context_parallel_limits,
    overlap_limits,
    what_a_cpu_refuses,
    lm_head_follows_attention,
    memory_share_is_a_share,
    pipeline_limits,
    *EXPERT_RULES,
    *SPECULATION_RULES,
)


def graphs_cover_the_batch(v: View) -> Complaints:
    if v.has("cuda-graph-max-bs-decode") and v.has("max-running-requests"):
        graph, running = v.whole("cuda-graph-max-bs-decode"), v.running_per_rank
        if graph < running:
            yield (
                f"graphs are captured up to {graph} requests, {running} may run: above, steps "
                "fall back to eager.",
                f"Raise --cuda-graph-max-bs-decode to {running}.",
            )


def chunk_is_divided(v: View) -> Complaints:
    if v.sizes.dp > 1 and v.has("chunked-prefill-size"):
        chunk = v.whole("chunked-prefill-size")
        yield (
            f"--chunked-prefill-size {chunk} is divided by attention's {v.sizes.dp} groups: "
            f"{chunk // v.sizes.dp} tokens each.",
            "Nothing to do unless prompts are to be prefilled in larger chunks.",
        )


def context_parallel_changes_sizes(v: View) -> Complaints:
    if v.is_v4 and v.sizes.cp > 1:
        yield (
            f"requested attn-cp {v.sizes.cp}; in effect attn-cp {v.sizes.tp}, dp 1, "
            "moe-dense-tp 1.",
            "SGLang sets these three for DeepSeek-V4.",
        )


# Requests per rank from which two batches were reported to gain (sgl-project/sglang issue 4068).
OVERLAP_PAYS_FROM = 64


def overlap_wants_a_batch(v: View) -> Complaints:
    decodes = v.role != "prefill" and not v.on_cpu
    if v.has("enable-two-batch-overlap") and decodes and 0 < v.running_per_rank < OVERLAP_PAYS_FROM:
        yield (
            f"two-batch overlap reads the weights twice, and {v.running_per_rank} requests per "
            f"rank may run; gains in decode were reported from {OVERLAP_PAYS_FROM}.",
            "Drop --enable-two-batch-overlap, or raise --max-running-requests; `sglang-ext plan "
            "--explain` prints the batch from which it pays.",
        )


def memory_share_was_seen_to_work(v: View) -> Complaints:
    reported, gpu = v.launch.model.reported, v.launch.hardware.gpu.name
    most, share = reported.shares.get(gpu), v.flags.get("mem-fraction-static")
    if most is not None and isinstance(share, int | float) and share > most:
        yield (
            f"--mem-fraction-static {share} is above {most}, the largest reported to work on "
            f"{gpu} ({reported.source}).",
            "Lower it if requests end in out-of-memory errors.",
        )


NOTES: tuple[Callable[[View], Complaints], ...] = (
    graphs_cover_the_batch,
    chunk_is_divided,
    context_parallel_changes_sizes,
    overlap_wants_a_batch,
    memory_share_was_seen_to_work,
)


def check(launch: Launch) -> list[Finding]:
    """Everything the rules say about a launch, errors first."""
    view = View(launch)
    levels: tuple[tuple[Literal["error", "note"], tuple[Callable[[View], Complaints], ...]], ...]
    levels = (("error", ERRORS), ("note", NOTES))
    return [
        Finding(rule.__name__.replace("_", "-"), level, reason, remedy)
        for level, rules in levels
        for rule in rules
        for reason, remedy in rule(view)
    ]


def require(launch: Launch) -> list[Finding]:
    """The notes of a launch without errors.

    Raises:
        ConfigError: every rule that is broken, each with its reason and remedy.
    """
    findings = check(launch)
    errors = [f for f in findings if f.level == "error"]
    if errors:
        raise ConfigError(
            launch.preset.name,
            ", ".join(f.rule for f in errors),
            expected="a launch that can work",
            found=" ".join(f.reason for f in errors),
            remedy=" ".join(f.remedy for f in errors),
        )
    return findings
