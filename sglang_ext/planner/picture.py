"""A layout as a picture: nodes, ranks, their groups, and what each rank holds. Plain SVG."""

from __future__ import annotations

from html import escape

from sglang_ext.core.layout import Coordinates, ParallelLayout
from sglang_ext.planner.memory import GB
from sglang_ext.planner.search import Answer, Plan

_WIDTH, _HEIGHT, _GAP, _MARGIN, _HEAD = 196, 132, 10, 16, 52
_PER_ROW = 4
_COLOURS = (
    "#4c78a8",
    "#f58518",
    "#54a24b",
    "#b79a20",
    "#72b7b2",
    "#e45756",
    "#9d755d",
    "#7f7f7f",
)
# Memory in the order it is stacked in a rank's bar.
_BARS = (("weights", "#5b8ff9"), ("kv", "#61ddaa"), ("reserve", "#d0d4dc"))


def draw(answer: Answer, plan: Plan) -> str:
    """The SVG of a plan: one box per rank, coloured by its attention data-parallel group."""
    layout, q = plan.layout, answer.question
    nodes = q.hardware.nodes
    ranks = layout.ranks(nodes)
    boxes: list[str] = []
    y = _HEAD
    for replica in range(layout.replicas):
        for node in range(nodes):
            mine = [r for r in range(ranks.world) if r // ranks.ranks_per_node == node]
            title = f"node {node}" if layout.replicas == 1 else f"replica {replica}"
            height = _block_height(len(mine))
            boxes.append(_frame(y, height, title, len(mine)))
            for place, rank in enumerate(mine):
                boxes += _rank(answer, plan, ranks, ranks.coordinates(rank), place, y + 22)
            y += height + _GAP
    width = 2 * _MARGIN + _PER_ROW * (_WIDTH + _GAP) + _GAP
    head = f"{q.model.name} on {q.hardware.name}: {layout.name}"
    legend = (
        f"colour: attention group (dp {layout.dp}); attn tp {layout.attn_tp}, cp {layout.cp}, "
        f"ep {layout.ep}, expert slices {layout.moe_tp}; bar: weights, KV, reserve"
    )
    legend += f"; drafts verified: {plan.basis}" if layout.algorithm else ""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + _MARGIN}" '
            f'viewBox="0 0 {width} {y + _MARGIN}" font-family="sans-serif" font-size="11">',
            f'<rect width="{width}" height="{y + _MARGIN}" fill="#ffffff"/>',
            _text(_MARGIN, 20, head, size=14, weight="bold"),
            _text(_MARGIN, 38, legend),
            *boxes,
            "</svg>",
            "",
        ]
    )


def _block_height(ranks: int) -> int:
    rows = -(-ranks // _PER_ROW)
    return 22 + rows * (_HEIGHT + _GAP)


def _frame(y: float, height: float, title: str, ranks: int) -> str:
    width = min(ranks, _PER_ROW) * (_WIDTH + _GAP) + _GAP
    box = f'<rect x="{_MARGIN}" y="{y}" width="{width}" height="{height}" fill="none" '
    return box + 'stroke="#888" rx="6"/>' + _text(_MARGIN + 8, y + 15, title, weight="bold")


def _rank(
    answer: Answer, plan: Plan, ranks: ParallelLayout, at: Coordinates, place: int, top: float
) -> list[str]:
    x = _MARGIN + _GAP + (place % _PER_ROW) * (_WIDTH + _GAP)
    y = top + (place // _PER_ROW) * (_HEIGHT + _GAP)
    colour = _COLOURS[at.attn_dp % len(_COLOURS)]
    lines = [f"rank {at.rank}", *_holdings(answer, plan, ranks, at)]
    shapes = [
        f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" fill="{colour}" '
        f'fill-opacity="0.14" stroke="{colour}" rx="4"/>'
    ]
    for i, line in enumerate(lines):
        shapes.append(_text(x + 8, y + 16 + 15 * i, line, weight="bold" if i == 0 else "normal"))
    return shapes + _bar(plan, x + 8, y + _HEIGHT - 16)


def _holdings(answer: Answer, plan: Plan, ranks: ParallelLayout, at: Coordinates) -> list[str]:
    """What a rank holds, in words."""
    shape, layout = answer.shape, plan.layout
    heads = shape.heads // ranks.attn_tp
    first = at.attn_tp * heads
    requests = layout.requests_per_group(answer.question.load.concurrency)
    lines = [f"attention group {at.attn_dp}: {requests} requests"]
    if layout.pp > 1:
        held = layout.layers_of(at.pp, shape.layers)
        lines.append(f"layers {held.start} to {held.stop - 1}")
    lines.append(f"heads {first} to {first + heads - 1}")
    if layout.cp > 1:
        lines.append(f"prompt tokens i with i mod {layout.cp} = {at.attn_cp}")
    if shape.experts:
        own = (shape.experts + layout.redundant) // ranks.ep
        slices = "" if ranks.moe_tp == 1 else f", slice {at.moe_tp + 1}/{ranks.moe_tp}"
        # With copies, which expert stands in which place is EPLB's to say.
        what = "expert places" if layout.redundant else "experts"
        lines.append(f"{what} {at.moe_ep * own} to {(at.moe_ep + 1) * own - 1}{slices}")
    if layout.algorithm:
        lines.append(f"draft: {layout.algorithm.upper()}, {plan.drafts} of {layout.gamma} verified")
    return lines


def _bar(plan: Plan, x: float, y: float) -> list[str]:
    """Memory of a rank against its capacity."""
    width = _WIDTH - 16
    shapes, at = [], x
    for part, colour in _BARS:
        size = sum(getattr(plan.memory, part).values())
        span = width * size / plan.memory.capacity
        shapes.append(f'<rect x="{at:.1f}" y="{y}" width="{span:.1f}" height="8" fill="{colour}"/>')
        at += span
    used = f"{plan.memory.total / GB:.0f} of {plan.memory.capacity / GB:.0f} GiB (derived)"
    frame = f'<rect x="{x}" y="{y}" width="{width}" height="8" fill="none" stroke="#666"/>'
    return [*shapes, frame, _text(x, y - 3, used, size=9)]


def _text(x: float, y: float, text: str, *, size: int = 11, weight: str = "normal") -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="#222"'
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'
