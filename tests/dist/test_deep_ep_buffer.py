"""The Buffer over gloo ranks against what a single rank can write down in closed form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from sglang_ext.core.dispatch import DispatchError
from sglang_ext.core.quant import decode_e4m3, decode_ue8m0
from sglang_ext.core.row_quant import quantise_rows
from sglang_ext.srt.parallel.deep_ep_buffer import Buffer
from sglang_ext.srt.parallel.deep_ep_types import Config
from tests.dist.forked import run_ranks
from tests.dist.routings import HIDDEN, Routing, routing

LIMIT = 8
LIMIT_FIELD = "num_max_dispatch_tokens_per_rank"
SEEDS = range(8)


def _send(buffer: Buffer, case: Routing, rank: int, x: Any = None, **options: Any) -> Any:
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(
        case.ids[rank], case.experts
    )
    return buffer.dispatch(
        case.x[rank] if x is None else x,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=case.ids[rank],
        topk_weights=case.weights[rank],
        **options,
    )


def _low_latency(group: dist.ProcessGroup, experts: int) -> Buffer:
    room = Buffer.get_low_latency_rdma_size_hint(LIMIT, HIDDEN, group.size(), experts)
    return Buffer(group, num_rdma_bytes=room, low_latency_mode=True)


def _check_normal(group: dist.ProcessGroup) -> None:
    rank = group.rank()
    for seed in SEEDS:
        case = routing(seed, group.size())
        buffer = Buffer(group)
        x, ids, weights, counts, handle, _ = _send(buffer, case, rank, expert_alignment=4)
        rows, local, gates = case.arriving(rank)
        assert torch.equal(x, rows)
        assert torch.equal(ids, local)
        assert torch.equal(weights, gates)
        assert counts == [-(-int((local == e).sum()) // 4) * 4 for e in range(case.per_rank)]

        sent = case.copies(rank, low_latency=False)
        mine = case.x[rank] * sum(
            (r + 1.0) * ((case.ids[rank] // case.per_rank == r) & (case.ids[rank] >= 0)).any(1)
            for r in range(case.ranks)
        ).view(-1, 1)
        total, back, _ = buffer.combine(x * (rank + 1.0), handle, topk_weights=weights)
        torch.testing.assert_close(total, mine)
        assert torch.equal(back, case.weights[rank] * (case.ids[rank] >= 0))

        bias = torch.full_like(mine, 3.0)
        biased, none, _ = buffer.combine(x * (rank + 1.0), handle, bias=(bias, bias))
        torch.testing.assert_close(biased, mine + 6.0)
        assert none is None

        traffic, choices = buffer.traffic["dispatch"], case.ids[rank].shape[1]
        width = 4 * HIDDEN + 12 * choices
        assert traffic.rows == sum(sent)
        assert traffic.bytes_to_peers == (sum(sent) - sent[rank]) * width
        assert traffic.bytes_kept == sent[rank] * width


def _check_reuse_and_fixed_size(group: dist.ProcessGroup) -> None:
    rank = group.rank()
    for seed in SEEDS:
        case = routing(seed, group.size())
        buffer = Buffer(group)
        worst = LIMIT * case.ranks
        x, ids, weights, counts, handle, _ = _send(buffer, case, rank, num_worst_tokens=worst)
        rows, local, _ = case.arriving(rank)
        assert x.shape == (worst, HIDDEN)
        assert counts == []
        assert torch.equal(x[: len(rows)], rows)
        assert (ids[len(rows) :] == -1).all()
        assert torch.equal(ids[: len(rows)], local)
        assert not weights[len(rows) :].any()

        other = Routing([2 * part for part in case.x], case.ids, case.weights, case.per_rank)
        again, *nothing, _ = buffer.dispatch(other.x[rank], handle=handle)
        assert nothing == [None] * 4
        assert torch.equal(again, 2 * rows)
        poisoned = x.clone()
        poisoned[len(rows) :] = float("nan")
        total, _, _ = buffer.combine(poisoned, handle)
        assert total.isfinite().all()
        with pytest.raises(DispatchError, match="num_worst_tokens"):
            buffer.dispatch(other.x[rank], handle=handle, num_worst_tokens=-1)


def _check_fp8(group: dist.ProcessGroup) -> None:
    rank = group.rank()
    for seed in SEEDS:
        case = routing(seed, group.size(), torch.bfloat16)
        codes, scales = zip(*(quantise_rows(part) for part in case.x), strict=True)
        buffer = Buffer(group)
        got, *_ = _send(buffer, case, rank, (codes[rank], scales[rank]))
        as_codes = Routing(
            [c.view(torch.uint8) for c in codes], case.ids, case.weights, case.per_rank
        )
        as_scales = Routing(list(scales), case.ids, case.weights, case.per_rank)
        assert got[0].dtype == torch.float8_e4m3fn
        assert torch.equal(got[0].view(torch.uint8), as_codes.arriving(rank)[0])
        if len(got[1]):
            assert torch.equal(got[1], as_scales.arriving(rank)[0])
        sent = sum(case.copies(rank, low_latency=False))
        moved = buffer.traffic["dispatch"]
        width = HIDDEN + 4 * HIDDEN // 128 + 12 * case.ids[rank].shape[1]
        assert moved.bytes_to_peers + moved.bytes_kept == sent * width


def _slots(case: Routing, rank: int, expert: int) -> list[tuple[int, int]]:
    """(source, token) in the leading slots of a local expert."""
    wanted = rank * case.per_rank + expert
    return [
        (source, token)
        for source, ids in enumerate(case.ids)
        for token, row in enumerate(ids.tolist())
        for i in row
        if i == wanted
    ]


def _check_low_latency(group: dist.ProcessGroup, hook: bool) -> None:
    rank = group.rank()
    for seed in SEEDS:
        case = routing(seed, group.size())
        buffer = _low_latency(group, case.experts)
        stats = torch.zeros(case.per_rank, dtype=torch.int32)
        x, counts, handle, _, arrive = buffer.low_latency_dispatch(
            case.x[rank],
            case.ids[rank],
            LIMIT,
            case.experts,
            cumulative_local_expert_recv_stats=stats,
            use_fp8=False,
            return_recv_hook=hook,
        )
        assert x.shape == (case.per_rank, LIMIT * case.ranks, HIDDEN)
        if hook:
            with pytest.raises(DispatchError, match="hook"):
                buffer.low_latency_combine(x, case.ids[rank], case.weights[rank], handle)
            arrive()
        outputs = torch.full_like(x, float("nan"))
        for expert in range(case.per_rank):
            filled = _slots(case, rank, expert)
            assert counts[expert] == stats[expert] == len(filled)
            for slot, (source, token) in enumerate(filled):
                assert torch.equal(x[expert, slot], case.x[source][token])
                outputs[expert, slot] = x[expert, slot] * (rank * case.per_rank + expert + 1)
        out = torch.empty_like(case.x[rank])
        total, _, collect = buffer.low_latency_combine(
            outputs, case.ids[rank], case.weights[rank], handle, return_recv_hook=hook, out=out
        )
        if hook:
            collect()
        factor = ((case.ids[rank] + 1) * case.weights[rank]).sum(dim=1, keepdim=True)
        assert total.data_ptr() == out.data_ptr()
        torch.testing.assert_close(total, case.x[rank] * factor)
        moved = buffer.traffic["low_latency_dispatch"]
        assert moved.rows == sum(case.copies(rank, low_latency=True))


def _check_low_latency_fp8(group: dist.ProcessGroup) -> None:
    rank = group.rank()
    for seed in SEEDS:
        case = routing(seed, group.size(), torch.bfloat16)
        case = Routing([x.repeat(1, 2) for x in case.x], case.ids, case.weights, case.per_rank)
        room = Buffer.get_low_latency_rdma_size_hint(LIMIT, 2 * HIDDEN, case.ranks, case.experts)
        buffer = Buffer(group, num_rdma_bytes=room, low_latency_mode=True)
        for packed in (False, True):
            (codes, scale), counts, *_ = buffer.low_latency_dispatch(
                case.x[rank],
                case.ids[rank],
                LIMIT,
                case.experts,
                round_scale=packed,
                use_ue8m0=packed,
            )
            slots = LIMIT * case.ranks
            assert scale.shape == (case.per_rank, slots, 2 * HIDDEN // (512 if packed else 128))
            assert scale.stride(1) == 1
            for expert in range(case.per_rank):
                used = int(counts[expert])
                wide = scale[expert, :used]
                if packed:
                    words = wide.new_empty(wide.shape).copy_(wide)
                    wide = decode_ue8m0(words.view(torch.uint8))
                values = decode_e4m3(codes[expert, :used]) * wide.repeat_interleave(128, dim=1)
                expected = [case.x[s][t].float() for s, t in _slots(case, rank, expert)]
                for row, exact in zip(values, expected, strict=True):
                    torch.testing.assert_close(row, exact, rtol=1 / 16, atol=0.02)


def _check_lifetimes(group: dist.ProcessGroup) -> None:
    rank, case = group.rank(), routing(5, group.size())
    buffer = _low_latency(group, case.experts)

    def send(hook: bool = False) -> Any:
        return buffer.low_latency_dispatch(
            case.x[rank], case.ids[rank], LIMIT, case.experts, use_fp8=False, return_recv_hook=hook
        )

    def combine(sent: Any) -> torch.Tensor:
        ids, weights = case.ids[rank], case.weights[rank]
        return buffer.low_latency_combine(sent[0].clone(), ids, weights, sent[2])[0]

    first, second = send(), send()
    assert first[0].data_ptr() != second[0].data_ptr()
    factor = (case.weights[rank] * (case.ids[rank] >= 0)).sum(dim=1, keepdim=True)
    torch.testing.assert_close(combine(first), case.x[rank] * factor)
    third = send()
    assert third[0].data_ptr() == first[0].data_ptr()
    with pytest.raises(DispatchError, match="last 2 low-latency dispatches"):
        combine(first)
    torch.testing.assert_close(combine(second), case.x[rank] * factor)

    others = torch.zeros(LIMIT, 9, dtype=torch.int64)
    with pytest.raises(DispatchError, match="ids of the dispatch"):
        buffer.low_latency_combine(third[0], others, others.float(), third[2])
    _send(buffer, case, rank)
    with pytest.raises(DispatchError, match="clean_low_latency_buffer"):
        send()
    buffer.clean_low_latency_buffer(LIMIT, HIDDEN, case.experts)
    with pytest.raises(DispatchError, match="last 2"):
        combine(third)
    late = send(hook=True)
    late[4]()
    combine(late)


def _check_limit(group: dist.ProcessGroup) -> str:
    """One rank has too many tokens: every rank must raise, none may hang."""
    ranks, rank = group.size(), group.rank()
    tokens = LIMIT + 1 if rank == ranks - 1 else 1
    buffer = _low_latency(group, ranks)
    x, ids = torch.zeros(tokens, HIDDEN), torch.zeros(tokens, 1, dtype=torch.int64)
    with pytest.raises(DispatchError) as caught:
        buffer.low_latency_dispatch(x, ids, LIMIT, ranks, use_fp8=False)
    # The group is still usable afterwards.
    buffer.low_latency_dispatch(x[:1], ids[:1], LIMIT, ranks, use_fp8=False)
    return str(caught.value)


def _check_moe(group: dist.ProcessGroup) -> None:
    """A layer of experts spread over the ranks equals the dense layer, in both modes."""
    rank = group.rank()
    for seed in SEEDS:
        case = routing(seed, group.size(), torch.float64)
        generator = torch.Generator().manual_seed(seed)
        matrices = torch.randn(
            case.experts, HIDDEN, HIDDEN, generator=generator, dtype=torch.float64
        )
        dense = torch.zeros_like(case.x[rank])
        for token, row in enumerate(case.ids[rank].tolist()):
            for choice, expert in enumerate(row):
                if expert >= 0:
                    out = torch.tanh(case.x[rank][token] @ matrices[expert])
                    dense[token] += case.weights[rank][token, choice] * out
        mine = matrices[rank * case.per_rank : (rank + 1) * case.per_rank]

        buffer = Buffer(group)
        x, ids, weights, _, handle, _ = _send(buffer, case, rank)
        outputs = torch.zeros_like(x)
        for expert in range(case.per_rank):
            rows, choices = (ids == expert).nonzero(as_tuple=True)
            gate = weights[rows, choices].double()[:, None]
            outputs.index_add_(0, rows, gate * torch.tanh(x[rows] @ mine[expert]))
        normal, _, _ = buffer.combine(outputs, handle)
        torch.testing.assert_close(normal, dense, rtol=1e-9, atol=1e-9)

        fast = _low_latency(group, case.experts)
        x, _, handle, *_ = fast.low_latency_dispatch(
            case.x[rank], case.ids[rank], LIMIT, case.experts, use_fp8=False
        )
        weighted, *_ = fast.low_latency_combine(
            torch.tanh(x @ mine), case.ids[rank], case.weights[rank], handle
        )
        torch.testing.assert_close(weighted, dense, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "check",
    [_check_normal, _check_reuse_and_fixed_size, _check_fp8, _check_low_latency_fp8,
     _check_lifetimes, _check_moe],
)  # fmt: skip
def test_exchange(ranks: int, check: Any) -> None:
    run_ranks(ranks, check)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("hook", [False, True])
def test_low_latency_exchange(ranks: int, hook: bool) -> None:
    run_ranks(ranks, _check_low_latency, hook)


@pytest.mark.parametrize("ranks", [2, 4])
def test_too_many_tokens_on_one_rank_is_an_error_on_all(ranks: int) -> None:
    *peers, last = run_ranks(ranks, _check_limit)
    assert f"at least the {LIMIT + 1} tokens" in last
    assert "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK" in last
    assert all(f"{LIMIT_FIELD}: expected accepted" in text for text in peers)
    assert all(f"refused on ranks [{ranks - 1}]" in text for text in peers)


def _check_wrong_input(group: dist.ProcessGroup) -> list[str]:
    """One rank has an input that cannot be sent: every rank must raise, none may hang."""
    ranks, rank = group.size(), group.rank()
    plain, fast = Buffer(group), _low_latency(group, 2 * ranks)
    x, gates = torch.ones(LIMIT, HIDDEN), torch.ones(LIMIT, 2)
    good = torch.tensor([[0, 1]] * LIMIT)
    outside, twice = good + 2 * ranks, good * 0

    def normal(ids: torch.Tensor, weights: torch.Tensor = gates, lost: int = 0) -> None:
        case = Routing([x] * ranks, [ids] * ranks, [weights] * ranks, 2)
        _send(plain, case, rank, x[lost:])

    def begun(ids: torch.Tensor) -> None:
        plain.begin_dispatch(x, ids, gates, 2 * ranks)()

    def low(ids: torch.Tensor) -> None:
        fast.low_latency_dispatch(x, ids, LIMIT, 2 * ranks, use_fp8=False)

    said = []
    for send, *wrong in (
        (normal, outside),
        (normal, good, gates[1:]),
        (normal, good, gates, 1),
        (begun, outside),
        (low, outside),
        (low, twice),
        (low, good[1:]),
    ):
        with pytest.raises(DispatchError) as caught:
            send(*(wrong if rank == ranks - 1 else [good]))
        said.append(str(caught.value))
        # The group is still usable afterwards.
        send(good)
    return said


def test_a_wrong_input_on_one_rank_is_an_error_on_all() -> None:
    *peers, last = run_ranks(3, _check_wrong_input)
    fields = ("topk_idx", "topk_weights", "is_token_in_rank", *("topk_idx",) * 4)
    for field, own, *others in zip(fields, last, *peers, strict=True):
        assert own.startswith(f"{field}: expected ")
        for text in others:
            assert text.startswith(f"{field}: expected accepted on every rank, found refused on")
            assert "ranks [2]" in text


def _check_refused(group: dist.ProcessGroup) -> None:
    case, rank = routing(5, group.size()), group.rank()
    with pytest.raises(DispatchError, match="enable_shrink"):
        Buffer(group, enable_shrink=True)
    with pytest.raises(DispatchError, match="comm"):
        Buffer(group, comm=object())
    plain = Buffer(group)
    x, ids = case.x[rank], case.ids[rank]
    with pytest.raises(DispatchError, match="low_latency_mode"):
        plain.low_latency_dispatch(x, ids, LIMIT, case.experts)
    small = Buffer(group, num_rdma_bytes=1, low_latency_mode=True)
    with pytest.raises(DispatchError, match="num_rdma_bytes"):
        small.low_latency_dispatch(x, ids, LIMIT, case.experts)
    fast = _low_latency(group, case.experts)
    for options, name in (
        ({"use_ue8m0": True}, "use_ue8m0"),
        ({"async_finish": True, "return_recv_hook": True}, "async_finish"),
        ({"dispatch_wait_recv_cost_stats": x}, "dispatch_wait_recv_cost_stats"),
    ):
        with pytest.raises(DispatchError, match=name):
            fast.low_latency_dispatch(x, ids, LIMIT, case.experts, **options)
    with pytest.raises(DispatchError, match="layout"):
        plain.dispatch(x)
    with pytest.raises(DispatchError, match="num_sms"):
        Config(num_sms=7)
    with pytest.raises(DispatchError, match="explicitly_destroy"):
        plain.destroy()
    kept = Buffer(group, explicitly_destroy=True)
    kept.destroy()
    with pytest.raises(DispatchError, match="destroyed"):
        _send(kept, case, rank)


def test_what_cannot_be_honoured_is_refused() -> None:
    run_ranks(1, _check_refused)
