"""The fast path against the naive one over ragged batches, with every unowned slot NaN."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_ext.kernels.attention import (
    AttentionPlan,
    AttentionSpec,
    BandMasks,
    PlanCosts,
    paged_attention,
)
from sglang_ext.kernels.attention.reference import reference_attention


@dataclass(frozen=True)
class Case:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor
    keys: tuple[int, ...]
    rows: tuple[int, ...]


def make_case(
    keys: tuple[int, ...],
    rows: tuple[int, ...],
    *,
    share: int = 3,
    kv_heads: int = 3,
    dim: int = 16,
    value_dim: int = 16,
    page: int = 1,
    contiguous: bool = False,
    tail: int = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Pool of pages in random order; a slot that no request owns holds NaN."""
    gen = torch.Generator().manual_seed(seed)
    pages = [-(-k // page) for k in keys]
    total = sum(pages) + 3
    order = torch.arange(total) if contiguous else torch.randperm(total, generator=gen)
    longest = max([*keys, 1])
    slots = torch.full((len(keys), longest + 2), total * page - 1)
    pool = torch.full((total * page, kv_heads, dim), float("nan"))
    values = torch.full((total * page, kv_heads, value_dim), float("nan"))
    first = 1
    for r, n in enumerate(keys):
        own = order[first : first + pages[r]]
        first += pages[r]
        line = (own[:, None] * page + torch.arange(page)).reshape(-1)[:n]
        slots[r, :n] = line
        pool[line] = torch.randn(n, kv_heads, dim, generator=gen)
        values[line] = torch.randn(n, kv_heads, value_dim, generator=gen)
    q = torch.randn(sum(rows) + tail, kv_heads * share, dim, generator=gen)
    return Case(q.to(dtype), pool.to(dtype), values.to(dtype), slots, keys, rows)


def run(
    case: Case,
    spec: AttentionSpec,
    *,
    sinks: torch.Tensor | None = None,
    tree: torch.Tensor | None = None,
    costs: PlanCosts | None = None,
) -> torch.Tensor:
    plan = AttentionPlan.build(
        case.slots, case.keys, case.rows, masks=BandMasks(), tree=tree, costs=costs
    )
    return paged_attention(case.q, case.k, case.v, plan, spec, sinks)


def check(
    case: Case,
    spec: AttentionSpec,
    *,
    sinks: torch.Tensor | None = None,
    tree: torch.Tensor | None = None,
    costs: PlanCosts | None = None,
    tolerance: float = 1e-5,
) -> None:
    got = run(case, spec, sinks=sinks, tree=tree, costs=costs)
    want = reference_attention(
        case.q, case.k, case.v, case.slots, case.keys, case.rows, spec, sinks, tree
    )
    torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance)


lengths = st.lists(
    st.tuples(st.integers(0, 45), st.integers(1, 40)).map(lambda t: (t[0] + t[1], t[1]))
    | st.just((0, 2)),
    min_size=1,
    max_size=6,
)
specs = st.builds(
    AttentionSpec,
    scale=st.just(0.3),
    causal=st.booleans(),
    window=st.sampled_from([-1, 0, 1, 5, 31]),
    logit_cap=st.sampled_from([0.0, 0.0, 2.0]),
    k_scale=st.sampled_from([1.0, 0.5]),
    v_scale=st.sampled_from([1.0, 2.0]),
)
# Everything in one call, one request a call, and the measured default.
cost_choices = st.sampled_from([PlanCosts(call=1e9), PlanCosts(call=0.0), PlanCosts()])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=lengths,
    spec=specs,
    costs=cost_choices,
    share=st.sampled_from([1, 3]),
    page=st.sampled_from([1, 16]),
    contiguous=st.booleans(),
    use_sinks=st.booleans(),
    tail=st.sampled_from([0, 3]),
    seed=st.integers(0, 99),
)
def test_ragged_batches(
    sizes: list[tuple[int, int]],
    spec: AttentionSpec,
    costs: PlanCosts,
    share: int,
    page: int,
    contiguous: bool,
    use_sinks: bool,
    tail: int,
    seed: int,
) -> None:
    keys, rows = (tuple(x) for x in zip(*sizes, strict=True))
    case = make_case(
        keys, rows, share=share, page=page, contiguous=contiguous, tail=tail, seed=seed
    )
    sinks = torch.linspace(-1, 2, case.q.shape[1]) if use_sinks else None
    check(case, spec, sinks=sinks, costs=costs)


@settings(max_examples=40, deadline=None)
@given(
    prefixes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    width=st.sampled_from([1, 2, 5, 33]),
    window=st.sampled_from([-1, 0, 3]),
    costs=cost_choices,
    seed=st.integers(0, 99),
)
def test_draft_tree(
    prefixes: list[int], width: int, window: int, costs: PlanCosts, seed: int
) -> None:
    gen = torch.Generator().manual_seed(seed)
    tree = torch.zeros(len(prefixes), width, width, dtype=torch.bool)
    for r in range(len(prefixes)):
        for node in range(width):
            tree[r, node, node] = True
            if node:
                parent = int(torch.randint(node, (), generator=gen))
                tree[r, node] |= tree[r, parent]
    keys = tuple(p + width for p in prefixes)
    case = make_case(keys, (width,) * len(keys), seed=seed)
    check(case, AttentionSpec(scale=0.3, window=window), tree=tree, costs=costs)
    check(case, AttentionSpec(scale=0.3, window=window, logit_cap=3.0), tree=tree, costs=costs)


@pytest.mark.parametrize(
    ("keys", "rows"),
    [
        ((613,), (613,)),  # plain causal prefill over several blocks
        ((901,), (300,)),  # chunked prefill after a cached prefix
        ((700, 521), (300, 300)),  # two ragged chunks in one call
        ((700, 650, 640, 1), (300, 1, 1, 1)),  # a mixed batch
    ],
)
@pytest.mark.parametrize("window", [-1, 37, 400])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("cap", [0.0, 4.0])
def test_long_rows(
    keys: tuple[int, ...], rows: tuple[int, ...], window: int, causal: bool, cap: float
) -> None:
    case = make_case(keys, rows, kv_heads=1, share=2, dim=8, value_dim=8)
    spec = AttentionSpec(scale=0.4, window=window, causal=causal, logit_cap=cap)
    for call in (1e9, 0.0):
        check(case, spec, costs=PlanCosts(call=call))


@pytest.mark.parametrize("rows", [(1, 1), (4, 2), (50, 40)])
@pytest.mark.parametrize("causal", [True, False])
def test_value_dim_differs(rows: tuple[int, int], causal: bool) -> None:
    case = make_case((60, 43), rows, dim=24, value_dim=8)
    check(case, AttentionSpec(scale=0.2, causal=causal))


@pytest.mark.parametrize("rows", [(1, 1, 1), (4, 2, 7), (50, 40, 41)])
def test_bfloat16_accumulates_in_float32(rows: tuple[int, ...]) -> None:
    case = make_case((300, 250, 41), rows, dim=64, value_dim=64, dtype=torch.bfloat16)
    check(case, AttentionSpec(scale=0.125), tolerance=2e-2)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_stored_dtype_differs(stored: torch.dtype) -> None:
    case = make_case((33, 20), (3, 1))
    case = Case(case.q, case.k.to(stored), case.v.to(stored), case.slots, case.keys, case.rows)
    check(case, AttentionSpec(scale=0.25, k_scale=0.5, v_scale=2.0))


def test_alone_equals_in_a_batch() -> None:
    keys, rows = (130, 7, 64, 99), (1, 4, 64, 8)
    case = make_case(keys, rows)
    spec = AttentionSpec(scale=0.3)
    together = run(case, spec, costs=PlanCosts(call=1e9))
    start = 0
    for r, count in enumerate(rows):
        stop = start + count
        alone = Case(
            case.q[start:stop], case.k, case.v, case.slots[r : r + 1], keys[r : r + 1], (count,)
        )
        torch.testing.assert_close(run(alone, spec), together[start:stop], rtol=1e-5, atol=1e-5)
        start = stop


def test_rows_beyond_the_plan_are_zero() -> None:
    case = make_case((9, 0, 5), (2, 1, 2), tail=2)
    out = run(case, AttentionSpec(scale=0.3))
    assert out[2].abs().sum() == 0
    assert out[5:].abs().sum() == 0
    assert out[:2].abs().sum() > 0


def test_idle_batch() -> None:
    case = make_case((), (), tail=2)
    assert run(case, AttentionSpec(scale=0.3)).abs().sum() == 0
    case = make_case((), ())
    assert run(case, AttentionSpec(scale=0.3)).shape == (0, 9, 16)


def test_masks_are_shared_by_layers_and_forwards() -> None:
    masks = BandMasks()
    case = make_case((40,), (4,))
    spec = AttentionSpec(scale=0.3)
    for _ in range(3):
        plan = AttentionPlan.build(case.slots, case.keys, case.rows, masks=masks)
        for _ in range(2):
            paged_attention(case.q, case.k, case.v, plan, spec)
    assert len(masks._templates) == 1


@pytest.mark.parametrize(
    ("keys", "rows", "field"),
    [((3,), (4,), r"keys\[0\]"), ((30, 9), (1, 1), r"keys\[0\]"), ((3, 3), (1,), "slots")],
)
def test_contradicting_lengths(keys: tuple[int, ...], rows: tuple[int, ...], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        AttentionPlan.build(
            torch.zeros(len(keys), 20, dtype=torch.int64), keys, rows, masks=BandMasks()
        )


def test_contradicting_shapes() -> None:
    case = make_case((9,), (2,))
    plan = AttentionPlan.build(case.slots, case.keys, case.rows, masks=BandMasks())
    spec = AttentionSpec(scale=0.3)
    with pytest.raises(ValueError, match="k_buffer: expected"):
        paged_attention(case.q[:, :8], case.k, case.v, plan, spec)
    with pytest.raises(ValueError, match="v_buffer: expected"):
        paged_attention(case.q, case.k, case.v[1:], plan, spec)
    with pytest.raises(ValueError, match="q: expected at least 2"):
        paged_attention(case.q[:1], case.k, case.v, plan, spec)
    with pytest.raises(ValueError, match="sinks: expected"):
        paged_attention(case.q, case.k, case.v, plan, spec, torch.zeros(2))
