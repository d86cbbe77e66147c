"""Which rank does what in a parallel layout, and which layouts are legal.

A layout names seven sizes. `tp` is the number of ranks of one pipeline stage, not the width of
attention's tensor parallelism: attention and the experts each divide those tp ranks anew.

    world    = tp * pp                   rank    = pp_rank * tp + tp_rank
    attn_tp  = tp / (dp * cp)            tp_rank = (attn_dp * cp + attn_cp) * attn_tp + attn_tp_rank
    moe_tp   = tp / (moe_dp * ep)        tp_rank = (moe_dp * ep + moe_ep) * moe_tp + moe_tp_rank
    node     = rank // (world / nnodes)

These are SGLang 0.5.23's ranks (`runtime_context.py`, `distributed/parallel_state.py`). `dp` is
data parallelism of attention inside one server; replicas of a whole server are outside a layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import log2
from operator import attrgetter
from typing import Literal, get_args

Kind = Literal["tp", "pp", "attn_dp", "attn_cp", "attn_tp", "moe_dp", "moe_ep", "moe_tp", "node"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_FLAGS = {
    "tp": "--tp-size",
    "dp": "--attn-dp-size",
    "cp": "--attn-cp-size",
    "ep": "--ep-size",
    "pp": "--pp-size",
    "moe_dp": "--moe-dp-size",
    "nnodes": "--nnodes",
}


@dataclass(frozen=True)
class Sizes:
    """What a user asks for, legal or not.

    tp: ranks of one pipeline stage
    dp: attention data-parallel groups
    cp: ranks that share one prompt
    ep: expert-parallel ranks
    pp: pipeline stages
    moe_dp: data-parallel groups of the experts
    nnodes: machines
    """

    tp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    moe_dp: int = 1
    nnodes: int = 1

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.tp * self.pp

    def values(self) -> tuple[int, ...]:
        """[7] in the order of the fields."""
        return (self.tp, self.dp, self.cp, self.ep, self.pp, self.moe_dp, self.nnodes)

    def flags(self) -> list[str]:
        """The sizes as arguments of `sglang.launch_server`."""
        pairs = zip(_FLAGS.values(), self.values(), strict=True)
        return [word for flag, value in pairs for word in (flag, str(value))]

    def __str__(self) -> str:
        return " ".join(f"{n}={v}" for n, v in zip(_FLAGS, self.values(), strict=True))


@dataclass(frozen=True)
class Rule:
    """One condition of legality, in words and as a test that assumes the rules before it."""

    name: str
    text: str
    holds: Callable[[Sizes], bool]


def _nodes_divide(s: Sizes) -> bool:
    if s.nnodes <= s.pp:
        return s.pp % s.nnodes == 0
    return s.nnodes % s.pp == 0 and s.tp % (s.nnodes // s.pp) == 0


RULES: tuple[Rule, ...] = (
    Rule(
        "positive",
        "every size is a whole number of at least 1",
        lambda s: all(type(v) is int and v >= 1 for v in s.values()),
    ),
    Rule("attention-split", "dp * cp divides tp", lambda s: s.tp % (s.dp * s.cp) == 0),
    Rule("expert-split", "ep * moe_dp divides tp", lambda s: s.tp % (s.ep * s.moe_dp) == 0),
    Rule(
        "expert-replicas-fill",
        "ep * moe_dp equals tp when both are above 1",
        lambda s: s.ep == 1 or s.moe_dp == 1 or s.ep * s.moe_dp == s.tp,
    ),
    Rule(
        "expert-replicas-follow-context",
        "moe_dp is 1 or equals cp",
        lambda s: s.moe_dp in (1, s.cp),
    ),
    Rule(
        "expert-replicas-one-stage",
        "pp is 1 when moe_dp is above 1",
        lambda s: s.moe_dp == 1 or s.pp == 1,
    ),
    Rule(
        "node-split",
        "a node holds whole pipeline stages, or a stage is split evenly over whole nodes",
        _nodes_divide,
    ),
)


class LayoutError(ValueError):
    """Sizes that no layout can have.

    rules: the broken rules; nearest: the legal layout closest to what was asked
    """

    def __init__(self, asked: Sizes, rules: list[Rule], nearest: ParallelLayout) -> None:
        self.asked, self.rules, self.nearest = asked, rules, nearest
        broken = "; ".join(f"{rule.text} ({rule.name})" for rule in rules)
        super().__init__(
            f"layout: expected {broken}; found {asked}. "
            f"Nearest legal layout, {nearest.world} ranks: {' '.join(nearest.flags())}"
        )


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands on every axis."""

    rank: int
    node: int
    pp: int
    tp: int
    attn_dp: int
    attn_cp: int
    attn_tp: int
    moe_dp: int
    moe_ep: int
    moe_tp: int


# A group of a kind joins the ranks that agree in these coordinates.
_SAME: dict[Kind, tuple[str, ...]] = {
    "tp": ("pp",),
    "pp": ("tp",),
    "attn_dp": ("pp", "attn_cp", "attn_tp"),
    "attn_cp": ("pp", "attn_dp", "attn_tp"),
    "attn_tp": ("pp", "attn_dp", "attn_cp"),
    "moe_dp": ("pp", "moe_ep", "moe_tp"),
    "moe_ep": ("pp", "moe_dp", "moe_tp"),
    "moe_tp": ("pp", "moe_dp", "moe_ep"),
    "node": ("node",),
}


@dataclass(frozen=True)
class ParallelLayout(Sizes):
    """Sizes that are legal together.

    Raises:
        LayoutError: the rules that are broken, and the nearest legal layout.
    """

    def __post_init__(self) -> None:
        broken = broken_rules(self)
        if broken:
            raise LayoutError(self, broken, nearest_legal(self))

    @property
    def attn_tp(self) -> int:
        return self.tp // (self.dp * self.cp)

    @property
    def moe_tp(self) -> int:
        return self.tp // (self.ep * self.moe_dp)

    @property
    def ranks_per_node(self) -> int:
        return self.world // self.nnodes

    def coordinates(self, rank: int) -> Coordinates:
        """Raises IndexError for a rank outside the layout."""
        if not 0 <= rank < self.world:
            raise IndexError(f"rank: expected 0..{self.world - 1}, found {rank}")
        pp, tp = divmod(rank, self.tp)
        attn_outer, attn_tp = divmod(tp, self.attn_tp)
        attn_dp, attn_cp = divmod(attn_outer, self.cp)
        moe_outer, moe_tp = divmod(tp, self.moe_tp)
        moe_dp, moe_ep = divmod(moe_outer, self.ep)
        node = rank // self.ranks_per_node
        return Coordinates(rank, node, pp, tp, attn_dp, attn_cp, attn_tp, moe_dp, moe_ep, moe_tp)

    def groups(self, kind: Kind) -> tuple[tuple[int, ...], ...]:
        """Every group of a kind, ranks ascending; together they hold each rank once.

        Experts that are replicated less often than prompts are split take their tokens from all
        context-parallel ranks: with cp above moe_dp the `moe_dp` groups ARE the `attn_cp` groups.
        """
        if kind == "moe_dp" and self.cp > self.moe_dp:
            kind = "attn_cp"
        members: dict[object, list[int]] = {}
        same = attrgetter(*_SAME[kind])
        for at in _places(self):
            members.setdefault(same(at), []).append(at.rank)
        return tuple(tuple(ranks) for ranks in members.values())

    def group_of(self, kind: Kind, rank: int) -> tuple[int, ...]:
        """The group of a kind that holds `rank`."""
        self.coordinates(rank)
        return next(group for group in self.groups(kind) if rank in group)

    def size(self, kind: Kind) -> int:
        """Ranks in each group of a kind."""
        return len(self.groups(kind)[0])

    def crosses_nodes(self, kind: Kind) -> bool:
        """Whether any group of a kind has ranks on two machines."""
        per_node = self.ranks_per_node
        return any(group[0] // per_node != group[-1] // per_node for group in self.groups(kind))

    def table(self) -> list[str]:
        """One line per rank: the rank and its place on the axes of attention and of the experts."""
        axes = ("attn_dp", "attn_cp", "attn_tp", "moe_dp", "moe_ep", "moe_tp")
        return [
            f"{p.rank} " + " ".join(f"{a} {getattr(p, a)}" for a in axes) for p in _places(self)
        ]


@lru_cache(maxsize=8)
def _places(layout: ParallelLayout) -> tuple[Coordinates, ...]:
    return tuple(map(layout.coordinates, range(layout.world)))


def broken_rules(sizes: Sizes) -> list[Rule]:
    """The rules that `sizes` break; without positive sizes the others have no meaning."""
    if not RULES[0].holds(sizes):
        return [RULES[0]]
    return [rule for rule in RULES if not rule.holds(sizes)]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def legal_layouts(world: int, nnodes: int = 1) -> Iterator[ParallelLayout]:
    """Every legal layout of `world` ranks on `nnodes` machines, in ascending order of its sizes."""
    for tp in _divisors(world):
        for dp in _divisors(tp):
            for cp in _divisors(tp // dp):
                yield from _with_experts(tp, dp, cp, world // tp, nnodes)


def _with_experts(tp: int, dp: int, cp: int, pp: int, nnodes: int) -> Iterator[ParallelLayout]:
    for ep in _divisors(tp):
        for moe_dp in sorted({1, cp}):
            if not broken_rules(Sizes(tp, dp, cp, ep, pp, moe_dp, nnodes)):
                yield ParallelLayout(tp, dp, cp, ep, pp, moe_dp, nnodes)


def nearest_legal(sizes: Sizes) -> ParallelLayout:
    """The legal layout closest to `sizes`.

    The hardware stays: as many ranks as asked and, where any layout allows it, as many nodes. Then
    as few sizes change as possible, by the smallest ratios (sum of |log2|); a tie goes to the
    larger sizes.
    """
    asked = tuple(max(int(v), 1) for v in sizes.values())
    world = asked[0] * asked[4]

    def distance(layout: ParallelLayout) -> tuple[object, ...]:
        ratios = [abs(log2(a / b)) for a, b in zip(layout.values(), asked, strict=True)]
        larger = tuple(-v for v in layout.values())
        return (sum(r > 0 for r in ratios), round(sum(ratios), 9), larger)

    nodes = asked[6] if any(legal_layouts(world, asked[6])) else 1
    return min(legal_layouts(world, nodes), key=distance)
