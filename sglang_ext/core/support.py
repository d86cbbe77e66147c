"""What runs on a machine without a GPU: layouts, algorithms and workloads, and what is refused.

The one source of the table in docs/layouts.md and of the end-to-end tests: every cell that says yes
is a test. What is refused by its flags stands in refusals.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_ext.core.refusals import STAGES

NONE, DSPARK, DFLASH, NEXTN = "none", "DSPARK", "DFLASH", "NEXTN"

DENSE, EXPERTS, V32, V4 = "dense", "experts", "DeepSeek-V3.2", "DeepSeek-V4"
# What stands for a kind of model in the tests.
MODELS = {
    DENSE: "a tiny Qwen3",
    EXPERTS: "a tiny Qwen3-MoE",
    V32: "a tiny DeepSeek-V3.2",
    V4: "a tiny DeepSeek-V4 with its bundled DSPARK draft; under NEXTN, one with an MTP module",
}

ALGORITHMS = (NONE, DSPARK, DFLASH)
# Drafting with the module of a checkpoint is DeepSeek-V4's alone.
ALGORITHMS_OF = {model: (*ALGORITHMS, NEXTN) if model == V4 else ALGORITHMS for model in MODELS}

# name -> what is sent
WORKLOADS = {
    "short": "one short prompt; the other ranks idle",
    "ragged": "ten prompts of 1 to 70 tokens at once, answers of unequal length",
    "chunked": "a prompt of several prefill chunks, alone and beside decoding requests",
    "one idle rank": "requests sent to one DP rank, the last of one token alone, then to the other",
    "abort": "requests stopped in the middle beside others that go on",
}


# A cell that no test holds to one rank; it may start.
UNTRIED = "not tried"


@dataclass(frozen=True)
class Layout:
    """One way to spread a model over ranks.

    flags: SGLang's arguments
    models: those of `MODELS` that the tests serve with it
    shows: lines of the ranks' logs that prove the layout was in use ("layout: first ...")
    speculation: None where DSPARK and DFLASH run, else why they are refused
    refused: (model, why) for the models that do not start with these flags
    """

    name: str
    flags: tuple[str, ...]
    models: tuple[str, ...] = (EXPERTS,)
    shows: tuple[str, ...] = ()
    speculation: str | None = None
    refused: tuple[tuple[str, str], ...] = ()

    def size(self, flag: str) -> int:
        """The number behind a flag; 1 when it is not given."""
        return int(self.flags[self.flags.index(flag) + 1]) if flag in self.flags else 1

    @property
    def attention_dp(self) -> int:
        return self.size("--attn-dp-size")

    @property
    def dp_ranks(self) -> int:
        """Ranks, or groups of ranks, that a request may be sent to by number."""
        return self.attention_dp * self.size("--dp-size")

    @property
    def ranks(self) -> int:
        return self.size("--tp-size") * self.size("--pp-size") * self.size("--dp-size")


def _flags(line: str) -> tuple[str, ...]:
    return tuple(line.split())


_DP2 = "--tp-size 2 --attn-dp-size 2"
_DEEPEP = "--moe-a2a-backend deepep"
_NORMAL = f"{_DEEPEP} --deepep-mode normal"
# A prefix hit leaves prefills of one token, which are not split.
_CP = "--enable-prefill-cp --disable-radix-cache --cp-strategy"
_EPLB = (
    "--enable-eplb --ep-num-redundant-experts 2 --eplb-rebalance-num-iterations 40 "
    "--expert-distribution-recorder-buffer-size 40"
)
_GATHERED = ("SUM_LEN gather of a prefill or verification",)
_SENT = ("normal expert exchange", "empty send to the experts")
_MOVED = ("experts moved between ranks",)
_LOW = ("low-latency expert exchange",)

# Models with experts; the dense one stands in where experts change nothing.
_MIXTURES = (EXPERTS, V32, V4)
STREAMS_OF_STAGES = "the streams are not sent between stages"

LAYOUTS: tuple[Layout, ...] = (
    Layout("tp2", _flags("--tp-size 2"), (DENSE, *_MIXTURES)),
    Layout("dp2 replicas", _flags("--dp-size 2"), (DENSE, *_MIXTURES)),
    Layout("dp2 attention", _flags(_DP2), (DENSE, *_MIXTURES), shows=_GATHERED),
    Layout("ep2 standard", _flags(f"{_DP2} --ep-size 2"), _MIXTURES, shows=_GATHERED),
    Layout("tp2 ep2 standard", _flags("--tp-size 2 --ep-size 2"), _MIXTURES),
    Layout("ep2 deepep normal", _flags(f"{_DP2} {_NORMAL}"), _MIXTURES, shows=_SENT),
    Layout(
        "ep2 deepep low_latency",
        _flags(f"{_DP2} {_DEEPEP} --deepep-mode low_latency --chunked-prefill-size 256"),
        _MIXTURES,
        shows=_LOW,
    ),
    Layout("ep2 deepep auto", _flags(f"{_DP2} {_DEEPEP}"), _MIXTURES, shows=_SENT + _LOW),
    Layout(
        "ep2 deepep dp-lm-head",
        _flags(f"{_DP2} {_DEEPEP} --enable-dp-lm-head --moe-dense-tp-size 1"),
        _MIXTURES,
        shows=_SENT + _LOW,
    ),
    Layout(
        "cp2 zigzag",
        _flags(f"--tp-size 2 --attn-cp-size 2 {_CP} zigzag"),
        (DENSE, *_MIXTURES),
        shows=("zigzag CP prefill",),
    ),
    Layout(
        "cp2 interleave",
        _flags(f"--tp-size 2 --attn-cp-size 2 {_CP} interleave"),
        (DENSE, *_MIXTURES),
        shows=("interleave CP prefill",),
    ),
    Layout(
        "cp2 zigzag ep2 deepep",
        _flags(f"--tp-size 2 --attn-cp-size 2 {_CP} zigzag {_NORMAL}"),
        _MIXTURES,
        shows=("zigzag CP prefill", "normal expert exchange"),
    ),
    Layout(
        "pp2",
        _flags("--pp-size 2"),
        (DENSE, EXPERTS, V32),
        speculation=STAGES,
        refused=((V4, STREAMS_OF_STAGES),),
    ),
    Layout(
        "pp2 dp2",
        _flags(f"--pp-size 2 {_DP2}"),
        (DENSE, EXPERTS, V32),
        speculation=STAGES,
        refused=((V4, STREAMS_OF_STAGES),),
    ),
    Layout(
        "two-batch overlap",
        _flags(f"{_DP2} {_NORMAL} --enable-two-batch-overlap"),
        _MIXTURES,
        shows=(
            "two-batch split of a prefill",
            "two-batch split inside a prompt",
            "two-batch prefill with an empty half",
            "two-batch split of a decode",
        ),
    ),
    Layout(
        "single-batch overlap",
        _flags(f"{_DP2} {_DEEPEP} --enable-single-batch-overlap"),
        _MIXTURES,
        shows=(*_SENT, *_LOW, "way back of expert rows in parts"),
    ),
    Layout("eplb static", _flags(f"{_DP2} {_NORMAL} {_EPLB}"), _MIXTURES, shows=_SENT + _MOVED),
    Layout(
        "eplb dynamic",
        _flags(f"{_DP2} --ep-size 2 --ep-dispatch-algorithm dynamic {_EPLB}"),
        _MIXTURES,
        shows=_MOVED,
    ),
    Layout(
        "tp4 dp2 ep4 deepep",
        _flags(f"--tp-size 4 --attn-dp-size 2 {_NORMAL}"),
        _MIXTURES,
        shows=_SENT,
    ),
    Layout(
        "tp4 cp2 ep4 deepep",
        _flags(f"--tp-size 4 --attn-cp-size 2 {_CP} zigzag {_NORMAL}"),
        _MIXTURES,
        shows=("zigzag CP prefill", "normal expert exchange"),
    ),
    Layout(
        "tp4 dp2 cp2 ep4 deepep",
        _flags(f"--tp-size 4 --attn-dp-size 2 --attn-cp-size 2 {_CP} interleave {_NORMAL}"),
        _MIXTURES,
        shows=("interleave CP prefill", *_SENT),
    ),
)

# (layout, model, algorithm) of the short test run: every layout, spread over models and algorithms.
COVERED = (
    ("tp2", EXPERTS, NONE),
    ("dp2 attention", V4, NONE),
    ("dp2 attention", EXPERTS, DFLASH),
    ("ep2 standard", EXPERTS, NONE),
    ("ep2 deepep normal", EXPERTS, NONE),
    ("ep2 deepep auto", V32, NONE),
    ("ep2 deepep auto", V4, NEXTN),
    ("ep2 deepep normal", V32, DFLASH),
    ("ep2 deepep low_latency", EXPERTS, DSPARK),
    ("ep2 deepep low_latency", V4, DSPARK),
    ("cp2 zigzag", DENSE, NONE),
    ("cp2 interleave", V4, NONE),
    ("cp2 interleave", DENSE, DSPARK),
    ("pp2", EXPERTS, NONE),
    ("two-batch overlap", EXPERTS, NONE),
    ("two-batch overlap", V4, NONE),
    ("two-batch overlap", EXPERTS, DSPARK),
    ("two-batch overlap", V32, DFLASH),
    ("two-batch overlap", V4, DSPARK),
    ("single-batch overlap", V32, DSPARK),
    ("eplb static", EXPERTS, NONE),
    ("tp4 dp2 ep4 deepep", EXPERTS, DSPARK),
    ("dp2 replicas", DENSE, DSPARK),
    ("tp2 ep2 standard", V32, DSPARK),
    ("ep2 deepep dp-lm-head", EXPERTS, DFLASH),
    ("cp2 zigzag ep2 deepep", V4, DSPARK),
    ("pp2 dp2", V32, NONE),
    ("eplb dynamic", V4, NONE),
    ("tp4 cp2 ep4 deepep", V32, DFLASH),
    ("tp4 dp2 cp2 ep4 deepep", V4, DSPARK),
)


def layout(name: str) -> Layout:
    """The layout of that name; KeyError names the known ones."""
    for one in LAYOUTS:
        if one.name == name:
            return one
    raise KeyError(f"layout {name!r}: expected one of {', '.join(x.name for x in LAYOUTS)}")


@dataclass(frozen=True)
class Verdict:
    """Whether a cell runs; `reason` is empty where it does."""

    reason: str = ""

    @property
    def yes(self) -> bool:
        return not self.reason


def verdict(where: Layout, model: str, algorithm: str, workload: str) -> Verdict:
    """The cell of a layout, a model of `MODELS`, an algorithm and a workload."""
    if algorithm not in ALGORITHMS_OF.get(model, ()) or workload not in WORKLOADS:
        raise KeyError(f"no such cell: {model!r}, {algorithm!r}, {workload!r}")
    for refused, why in where.refused:
        if model == refused:
            return Verdict(why)
    if model not in where.models:
        return Verdict(UNTRIED)
    if algorithm != NONE:
        return Verdict(where.speculation or "")
    return Verdict()
