"""Seconds of a decode round, a draft and a prefill of one layout, from rooflines."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_ext.launcher.catalog import Hardware
from sglang_ext.planner.draft import DraftShape
from sglang_ext.planner.layout import Layout
from sglang_ext.planner.numbers import DEFAULT, Assumptions
from sglang_ext.planner.roofline import LayerTime, LayerWork, Rates, layer_time
from sglang_ext.planner.shape import BF16, Shape

# Share of the SMs that SGLang 0.5.23's single-batch overlap gives to the combine: 3 of 132 before
# Blackwell, 32 of 148 there.
SBO_SMS = (3 / 132, 32 / 148)
SCALES = 4 / 128  # bytes of scales beside a dispatched fp8 value


@dataclass(frozen=True)
class Machine:
    """The rates that kernels reach on one rank, and how long a collective takes to start."""

    hbm: float
    bf16: float
    experts: float
    link: float
    dispatch: float
    latency: float
    step: float
    hop: float
    hop_latency: float

    @classmethod
    def of(
        cls, machine: Hardware, shape: Shape, layout: Layout, given: Assumptions = DEFAULT
    ) -> Machine:
        gpu = machine.gpu
        remote = layout.tp > machine.per_node
        link = (gpu.nic if remote else gpu.nvlink) * given.link
        dispatch = gpu.nic * given.link if remote else gpu.nvlink * given.dispatch
        fast = gpu.fp8 if shape.expert < BF16 and gpu.fp8 else gpu.bf16
        return cls(
            hbm=gpu.hbm * given.memory,
            bf16=gpu.bf16 * given.compute,
            experts=fast * given.compute,
            link=link,
            dispatch=dispatch,
            latency=given.remote if remote else given.local,
            step=given.step,
            hop=(gpu.nic if machine.nodes > 1 else gpu.nvlink) * given.link,
            hop_latency=given.remote if machine.nodes > 1 else given.local,
        )


@dataclass(frozen=True)
class Round:
    """Seconds of one decode round by part; `total` is what a request waits for."""

    attention: float
    experts: float
    communication: float
    hidden: float
    head: float
    draft: float
    host: float

    @property
    def total(self) -> float:
        visible = self.attention + self.experts + self.communication - self.hidden
        return visible + self.head + self.draft + self.host

    def terms(self) -> dict[str, float]:
        parts = {k: v for k, v in vars(self).items() if k != "hidden"}
        return dict(sorted(parts.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class Model:
    """A target, its draft, a layout and a machine: everything the times depend on."""

    shape: Shape
    draft: DraftShape | None
    layout: Layout
    hardware: Hardware
    assumptions: Assumptions = DEFAULT

    @property
    def machine(self) -> Machine:
        return Machine.of(self.hardware, self.shape, self.layout, self.assumptions)

    def round(
        self, requests: int, drafts: int, context: float, *, tbo: bool | None = None
    ) -> Round:
        """A round of `requests` per attention group that verifies 1 + `drafts` rows each."""
        machine = self.machine
        split = self.layout.tbo if tbo is None else tbo
        # A round of a pipeline is `pp` small batches under way at once, each through all stages.
        stages = self.layout.pp
        requests = -(-requests // stages)
        whole = self._layers(requests, requests * (drafts + 1), context, machine)
        hidden = 0.0
        if split and requests > 1:
            # Each half reads all weights again; what one half sends hides behind the other.
            half = self._layers(requests / 2, requests * (drafts + 1) / 2, context, machine)
            computed = 2 * (half.attention + half.experts)
            whole = LayerTime(2 * half.attention, 2 * half.experts, 2 * half.communication)
            hidden = min(computed, whole.communication) * self.assumptions.overlap
        elif self.layout.sbo:
            hidden = self._beside_one_batch(requests * (drafts + 1), whole, machine)
        # The largest stage sets the pace of all.
        uneven = -(-self.shape.layers // stages) * stages / self.shape.layers
        head = self.shape.vocab * self.shape.hidden * BF16 / self.layout.attn_tp / machine.hbm
        return Round(
            attention=whole.attention * uneven,
            experts=whole.experts * uneven,
            communication=whole.communication * uneven
            + self._hops(requests * (drafts + 1), machine),
            hidden=hidden,
            head=head,
            draft=self._draft(requests, drafts, context, machine),
            host=machine.step * stages + self._eager,
        )

    @property
    def _eager(self) -> float:
        """Host seconds under EPLB: its recorder needs DeepEP's normal mode, which has no graphs."""
        return self.shape.layers * self.assumptions.eager if self.layout.redundant else 0.0

    def _hops(self, rows: float, machine: Machine) -> float:
        """Hidden states from stage to stage, and the token back to the first."""
        pp = self.layout.pp
        if pp == 1:
            return 0.0
        return pp * machine.hop_latency + (pp - 1) * rows * self.shape.hidden * BF16 / machine.hop

    def _beside_one_batch(self, rows: float, whole: LayerTime, machine: Machine) -> float:
        """Exchange hidden behind the experts of the same batch, less what its SMs cost them."""
        s = self.shape
        read = s.shared_params * s.linear / machine.hbm
        computed = s.moe_layers * max(read, rows * 2 * s.shared_params / machine.experts)
        taken = SBO_SMS[self.hardware.gpu.capability >= (10, 0)]
        return min(computed, whole.communication) * self.assumptions.overlap - taken * whole.experts

    @property
    def _skew(self) -> float:
        """Load of the busiest expert rank over the mean."""
        a = self.assumptions
        if self.layout.ep == 1:
            return 1.0
        return min(a.imbalance, a.balanced) if self.layout.redundant else a.imbalance

    def _layers(self, requests: float, rows: float, context: float, machine: Machine) -> LayerTime:
        """All layers together: `requests` and `rows` of one attention group."""
        s, a = self.shape, self.layout
        net = machine.dispatch if a.a2a == "deepep" else machine.link
        rates = Rates(machine.hbm, machine.bf16, machine.experts, net)
        reads = sum(k.count * k.reads(context) / min(a.attn_tp, k.kv_shards) for k in s.kinds)
        weights = s.attention_per_rank(a.attn_tp) + s.dense_layers * s.dense / a.attn_tp
        work = LayerWork(
            attention_bytes=weights * s.linear + requests * reads,
            attention_flop=rows * (s.pair_flops(context, a.attn_tp) + 2 * weights),
            expert_bytes=self._expert_bytes(rows * a.dp),
            expert_flop=self._expert_flop(rows * a.dp) * self._skew,
            sent_bytes=s.layers * self._sent(rows),
            latency=s.layers * self._collectives() * machine.latency,
        )
        return layer_time(work, rates)

    def _expert_bytes(self, rows: float) -> float:
        """Weights of the experts that `rows` tokens of all groups touch on one rank."""
        s, a = self.shape, self.layout
        if not s.moe_layers:
            return 0.0
        touched = min(1.0, self._skew * (1 - (1 - s.top_k / s.experts) ** rows))
        routed = s.experts * touched * s.expert_params * s.expert / a.tp
        shared = s.shared_params * s.linear / (1 if a.a2a == "deepep" else a.tp)
        return s.moe_layers * (routed + shared)

    def _expert_flop(self, rows: float) -> float:
        s, a = self.shape, self.layout
        return s.moe_layers * rows * 2 * (s.top_k * s.expert_params + s.shared_params) / a.tp

    def _sent(self, rows: float) -> float:
        """Bytes that one rank sends in one layer."""
        s, a = self.shape, self.layout
        row = s.hidden * BF16
        reduced = 2 * row * rows * (a.attn_tp - 1) / a.attn_tp
        if a.a2a == "deepep":
            away = s.top_k * (1 - 1 / a.ep)
            return reduced + rows / a.attn_tp * away * s.hidden * (1 + SCALES + BF16)
        if a.dp > 1:
            # Gather every group's rows to all ranks, reduce and scatter them back.
            return reduced + 2 * row * rows * a.dp * (a.tp - 1) / a.tp
        return reduced + 2 * row * rows * (a.tp - 1) / a.tp

    def _collectives(self) -> int:
        return (
            0
            if self.layout.tp == 1
            else (2 if self.layout.attn_tp > 1 else 1)
            + (1 if self.layout.a2a == "deepep" or self.layout.dp > 1 else 0)
        )

    def _draft(self, requests: float, drafts: int, context: float, machine: Machine) -> float:
        d, a = self.draft, self.layout
        if d is None or drafts == 0:
            return 0.0
        rows = requests * drafts
        touched = 1.0
        if d.experts:
            touched = 1 - (1 - d.top_k / d.experts) ** (rows * a.dp)
        read = d.shared_per_rank(a.attn_tp) + d.routed * touched / a.tp
        read += requests * (d.kv_token * context + d.kv_request) / min(a.attn_tp, d.kv_shards)
        # One pass over the block, the head over its rows, then one small step per token.
        block = max(read / machine.hbm, 2 * rows * d.row_params / a.attn_tp / machine.bf16)
        head = self.shape.vocab * self.shape.hidden * BF16 / a.attn_tp / machine.hbm
        serial = drafts * (d.serial / a.attn_tp / machine.hbm + machine.latency)
        return block + head + serial

    def prefill(self, tokens: float) -> float:
        """Seconds until one lone prompt is read, queueing left out."""
        s, a, machine = self.shape, self.layout, self.machine
        weights = s.attention_per_rank(a.attn_tp) + s.dense_layers * s.dense / a.attn_tp
        pairs = s.pair_flops(tokens / 2, a.attn_tp)
        dense = tokens / a.cp * (2 * weights + pairs) / machine.bf16
        # Experts are shared by all groups, each with a prompt of its own.
        routed = self._expert_flop(tokens * a.dp) / machine.experts
        sent = s.layers * self._sent(tokens / a.cp)
        net = machine.dispatch if a.a2a == "deepep" else machine.link
        read = (self._expert_bytes(tokens) + weights * s.linear) / machine.hbm
        return max(dense + routed, read) + sent / net + machine.step
