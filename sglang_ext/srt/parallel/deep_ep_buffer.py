"""`deep_ep.Buffer` over torch.distributed: the same calls and results on any backend and device.

    deep_ep            CUDA kernels over NVLink and RDMA, asynchronous on a communication stream
    torch.distributed  all_to_all_single, gloo or NCCL; a call returns when its rows have arrived;
                       a begin_... call, or a receive hook, waits later
The difference absorbed here: registered memory, SMs, queue pairs, chunk sizes and streams have no
counterpart. Such arguments are accepted and change nothing in the results; what would change them
and cannot be honoured is refused. Rows may be of any float type, not bfloat16 alone. Contract:
deepseek-ai/DeepEP 2.1.0, `deep_ep/buffers/legacy.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from sglang_ext.core.dispatch import DispatchError, ExpertShards, Layout, layout
from sglang_ext.srt.parallel import deep_ep_normal
from sglang_ext.srt.parallel.deep_ep_low_latency import LowLatencyExchange, buffer_bytes
from sglang_ext.srt.parallel.deep_ep_normal import Received, Rows
from sglang_ext.srt.parallel.deep_ep_types import (
    Config,
    EventOverlap,
    LowLatencyHandle,
    NormalHandle,
    check_sms,
)
from sglang_ext.srt.parallel.row_exchange import RowExchange, Traffic
from sglang_ext.srt.parallel.told_counts import told

_RANKS_PER_NODE = 8

Dispatched = tuple[
    Rows, Tensor | None, Tensor | None, list[int] | None, NormalHandle | None, EventOverlap
]
Hook = Callable[[], None]


class Buffer:
    """Expert-parallel exchanges of one group.

    traffic: per kind of call, the rows and bytes this rank has sent
    """

    num_sms: int = 20

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: object = None,
    ) -> None:
        """Raises DispatchError for `enable_shrink` and `comm`, which have no counterpart."""
        _refuse("enable_shrink", enable_shrink, "Ranks of a process group cannot leave it.")
        _refuse("comm", comm is not None, "Pass a torch.distributed process group.")
        self.group = group
        self.group_size = group.size()
        self.rank = group.rank()
        self.low_latency_mode = low_latency_mode
        self.num_rdma_bytes = num_rdma_bytes
        self.explicitly_destroy = explicitly_destroy
        kinds = ("dispatch", "combine", "low_latency_dispatch", "low_latency_combine")
        self.traffic = {kind: Traffic() for kind in kinds}
        self._exchange: RowExchange | None = RowExchange(group)
        self._low_latency = LowLatencyExchange(self._exchange)
        self._clean = True

    def destroy(self) -> None:
        """Ends a buffer made with `explicitly_destroy`; later calls are errors."""
        _refuse("destroy", not self.explicitly_destroy, "Make it with explicitly_destroy=True.")
        self._low_latency.forget()
        self._exchange = None

    @property
    def is_clean(self) -> bool:
        """Whether low-latency calls may follow: no normal one since the last clean."""
        return self._clean

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        check_sms(new_num_sms)
        cls.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap.now()

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes that low-latency mode holds on each rank."""
        return buffer_bytes(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        return Config(cls.num_sms)

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> Config:
        return Config(cls.num_sms)

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """topk_idx [T, K], -1 for no choice -> what `dispatch` needs to know.

        Returns:
            num_tokens_per_rank [R] int32, num_tokens_per_rdma_rank [R / 8] int32 or None within
            8 ranks, num_tokens_per_expert [E] int32, is_token_in_rank [T, R] bool, event.

        Raises:
            DispatchError: ids that are none; the peers raise in the dispatch that follows.
        """
        plan = self._layout(self._ready(previous_event), topk_idx, num_experts)
        return (
            plan.tokens_per_rank,
            plan.tokens_per_node,
            plan.tokens_per_expert,
            plan.in_rank,
            EventOverlap.now(),
        )

    def dispatch(
        self,
        x: Rows,
        handle: NormalHandle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Dispatched:
        """Sends each token once to every rank that holds one of its experts.

        Args:
            x: [T, H] float, or (e4m3 [T, H], scales [T, H/128] float32).
            handle: of an earlier dispatch; x then travels the same ways, and the layout and the
                choices are not passed.
            num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank,
                num_tokens_per_expert: from `get_dispatch_layout`.
            topk_idx: [T, K]; topk_weights: [T, K].
            expert_alignment: the counts per expert are rounded up to a multiple of it.
            num_worst_tokens: above 0, the rows received are padded to it and not counted; within
                8 ranks only.

        Returns:
            rows [N, H] or (rows, scales) by source rank then token; topk_idx [N, K] with local
            ids, -1 for an expert elsewhere; topk_weights [N, K]; rows per local expert; handle;
            event. With `handle`, only the rows and the event.
        """
        exchange = self._ready(previous_event)
        self._clean = False
        if num_worst_tokens and self.group_size > _RANKS_PER_NODE:
            _refuse("num_worst_tokens", True, f"Only up to {_RANKS_PER_NODE} ranks; pass 0.")
        traffic = self.traffic["dispatch"]
        if handle is not None:
            chosen = topk_idx is not None or topk_weights is not None
            _refuse("topk_idx with handle", chosen, "The handle knows the ways; pass neither.")
            again = deep_ep_normal.dispatch_again(exchange, traffic, x, handle, num_worst_tokens)
            return again, None, None, None, None, EventOverlap.now()
        if num_tokens_per_rank is None or is_token_in_rank is None or num_tokens_per_expert is None:
            raise DispatchError(
                "layout",
                expected="num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert",
                found="None",
                remedy="Call get_dispatch_layout, or pass a handle.",
            )
        width = 1 + len(num_tokens_per_expert) // self.group_size
        with told(exchange, width, is_token_in_rank.device):
            if not torch.equal(is_token_in_rank.sum(dim=0), num_tokens_per_rank.long()):
                raise DispatchError(
                    "num_tokens_per_rank",
                    expected=f"{is_token_in_rank.sum(dim=0).tolist()} as in is_token_in_rank",
                    found=num_tokens_per_rank.tolist(),
                    remedy="Pass both from one get_dispatch_layout.",
                )
        received = deep_ep_normal.dispatch(
            exchange,
            traffic,
            x,
            in_rank=is_token_in_rank,
            tokens_per_expert=num_tokens_per_expert,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            alignment=expert_alignment,
            worst=num_worst_tokens,
        )()
        return (*received, EventOverlap.now())

    def begin_dispatch(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, num_experts: int
    ) -> Callable[[], Received]:
        """Not of deep_ep: layout and `dispatch`, whose rows arrive in the call returned.

        Every rank begins its transfers in the same order.
        """
        exchange = self._ready(None)
        self._clean = False
        plan = self._layout(exchange, topk_idx, num_experts)
        return deep_ep_normal.dispatch(
            exchange,
            self.traffic["dispatch"],
            x,
            in_rank=plan.in_rank,
            tokens_per_expert=plan.tokens_per_expert,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            alignment=1,
            worst=0,
        )

    def combine(
        self,
        x: Tensor,
        handle: NormalHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, ...] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sums the rows of all ranks per token, WITHOUT weights: the experts have applied them.

        Args:
            x: [N, H], in the order of the rows received.
            topk_weights: [N, K] or None, summed likewise.
            bias: up to two [T, H] added to the sum.

        Returns:
            [T, H] in x's dtype, summed in float32; summed weights [T, K] or None; event.
        """
        exchange = self._ready(previous_event)
        terms = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
        _refuse("bias", len(terms) > 2, "At most two can be added.")
        total, weights = deep_ep_normal.combine(
            exchange, self.traffic["combine"], x, handle, topk_weights, terms
        )()
        return total, weights, EventOverlap.now()

    def begin_combine(self, x: Tensor, handle: NormalHandle) -> Callable[[], Tensor]:
        """Not of deep_ep: `combine` of rows [N, H] alone; the call returned gives [T, H]."""
        exchange, traffic = self._ready(None), self.traffic["combine"]
        collect = deep_ep_normal.combine(exchange, traffic, x, handle, None, ())
        return lambda: collect()[0]

    def begin_rows(
        self, kind: str, rows: Tensor, sent: list[int], received: list[int]
    ) -> Callable[[], Tensor]:
        """Not of deep_ep: rows [sum(sent), H] as they are, counted as a call of `kind`.

        sent, received: [R] rows for and from each rank. The call returned gives [sum(received), H].
        """
        finish = self._ready(None).rows([rows], sent, received, self.traffic[kind])
        return lambda: finish()[0]

    def watch(self, transfers: Callable[[], Callable[[], None]] | None) -> None:
        """Have every transfer told to `transfers`, which returns what is called at its end."""
        self._ready(None).watch = transfers

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Must stand between a normal-mode call and a low-latency one, as with deep_ep."""
        self._check_room(num_max_dispatch_tokens_per_rank, hidden, num_experts)
        self._low_latency.forget()
        self._clean = True

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Rows, Tensor, LowLatencyHandle, EventOverlap, Hook | None]:
        """Sends one copy per (token, expert) into slots of the expert's rank.

        Args:
            x: [T, H], T at most M on every rank.
            topk_idx: [T, K], an expert at most M times on one rank. What one rank may not send
                raises on all of them.
            num_max_dispatch_tokens_per_rank: M, the same on every rank.
            cumulative_local_expert_recv_stats: [E/R] int32, the counts received are added.
            use_fp8: rows travel and arrive as e4m3 with scales per 128 columns.
            round_scale: scales are powers of two.
            use_ue8m0: scales are their exponents, four to an int32; needs round_scale.
            return_recv_hook: rows are in the buffer only after the hook returned was called.

        Returns:
            rows [E/R, M*R, H], or (rows, scales [E/R, M*R, H/128] or [E/R, M*R, H/512], column-
            major); recv_count [E/R] int32, the leading slots in use, the others hold anything;
            handle; event; hook or None. The second dispatch after this one overwrites the rows.
        """
        self._ready(None)
        _refuse("dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats is not None,
                "There is no per-rank waiting time to report.")  # fmt: skip
        _refuse("use_ue8m0 without round_scale", use_ue8m0 and not round_scale,
                "ue8m0 holds powers of two only; set round_scale.")  # fmt: skip
        _refuse_both(async_finish, return_recv_hook)
        self._check_room(num_max_dispatch_tokens_per_rank, x.shape[1], num_experts)
        _refuse("low-latency call after a normal one", not self._clean,
                "Call clean_low_latency_buffer in between.")  # fmt: skip
        buffers, counts, handle, arrive = self._low_latency.dispatch(
            self.traffic["low_latency_dispatch"],
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            ExpertShards(num_experts, self.group_size),
            fp8=use_fp8,
            power_of_two=round_scale,
            packed=use_ue8m0,
        )
        if cumulative_local_expert_recv_stats is not None:
            cumulative_local_expert_recv_stats.add_(counts)
        if not return_recv_hook:
            arrive()
        rows: Rows = (buffers[0], buffers[1]) if use_fp8 else buffers[0]
        return rows, counts, handle, EventOverlap.now(), arrive if return_recv_hook else None

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        """[E/R, M*R, H] bfloat16 to write expert outputs into, for `zero_copy`."""
        return self._low_latency.outputs(handle, handle.slots.device)

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        """sum_k topk_weights[t, k] * output of expert topk_idx[t, k] for token t.

        Args:
            x: [E/R, M*R, H], outputs in the slots of the dispatch.
            topk_idx, topk_weights: [T, K] of the dispatch.
            zero_copy: x is the tensor of `get_next_low_latency_combine_buffer`.
            out: [T, H] to write into.

        Returns:
            [T, H] in x's dtype, summed in float32, valid after the hook; event; hook or None.
        """
        self._ready(None)
        _refuse("use_logfmt", use_logfmt, "Rows return uncompressed; pass False.")
        _refuse_both(async_finish, return_recv_hook)
        _refuse("zero_copy", zero_copy and not self._low_latency.is_outputs(x),
                "Write into get_next_low_latency_combine_buffer and pass it.")  # fmt: skip
        traffic = self.traffic["low_latency_combine"]
        collect = self._low_latency.combine(traffic, x, topk_idx, topk_weights, handle)
        total = out if out is not None else x.new_empty((topk_idx.shape[0], x.shape[2]))

        def finish() -> None:
            total.copy_(collect())

        if not return_recv_hook:
            finish()
        return total, EventOverlap.now(), finish if return_recv_hook else None

    def _layout(self, exchange: RowExchange, topk_idx: Tensor, num_experts: int) -> Layout:
        shards = ExpertShards(num_experts, self.group_size)
        with told(exchange, 1 + shards.per_rank, topk_idx.device):
            return layout(topk_idx, shards, _RANKS_PER_NODE)

    def _ready(self, previous_event: EventOverlap | None) -> RowExchange:
        if self._exchange is None:
            raise DispatchError(
                "buffer", expected="alive", found="destroyed", remedy="Make a new one."
            )
        _wait(previous_event)
        return self._exchange

    def _check_room(self, max_tokens: int, hidden: int, experts: int) -> None:
        _refuse("low-latency call", not self.low_latency_mode,
                "Make the buffer with low_latency_mode=True.")  # fmt: skip
        needed = buffer_bytes(max_tokens, hidden, self.group_size, experts)
        if needed > self.num_rdma_bytes:
            raise DispatchError(
                "num_rdma_bytes",
                expected=f"at least {needed}",
                found=self.num_rdma_bytes,
                remedy="Take it from Buffer.get_low_latency_rdma_size_hint.",
            )


def _wait(event: EventOverlap | None) -> None:
    if event is not None:
        event.current_stream_wait()


def _refuse(field: str, when: bool, remedy: str) -> None:
    if when:
        raise DispatchError(field, expected="not used", found="used", remedy=remedy)


def _refuse_both(async_finish: bool, hook: bool) -> None:
    _refuse("async_finish with return_recv_hook", async_finish and hook, "Choose one.")
