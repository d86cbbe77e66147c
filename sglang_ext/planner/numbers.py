"""Where a number comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Basis = Literal["measured", "derived", "assumed"]
_ORDER: tuple[Basis, ...] = ("measured", "derived", "assumed")


@dataclass(frozen=True)
class Number:
    """A value with its unit and basis: `measured` somewhere, `derived` from facts, `assumed`."""

    value: float
    unit: str
    basis: Basis

    def __str__(self) -> str:
        return f"{self.value:,.4g} {self.unit} ({self.basis})"


def weakest(*bases: Basis) -> Basis:
    """A number is worth no more than the worst it was made from."""
    return max(bases, key=_ORDER.index)


# What the time model takes for granted; a bench through `--validate` says how far off it is.
@dataclass(frozen=True)
class Assumptions:
    """Shares of peak rates that kernels reach, and fixed times in seconds.

    memory, compute: share of HBM bandwidth and of FLOP per second; link: of NVLink and NIC
    dispatch: share of NVLink that DeepEP's low-latency kernels reach
    overlap: share of what two-batch overlap could hide that it hides
    local, remote: start of one collective inside a node, across nodes; step: host time per step
    imbalance: load of the busiest expert rank over the mean; balanced: what EPLB leaves of it
    eager: host time of a layer without CUDA graphs, as in DeepEP's normal mode
    """

    memory: float = 0.8
    compute: float = 0.6
    link: float = 0.8
    dispatch: float = 0.5
    overlap: float = 0.8
    local: float = 8e-6
    remote: float = 25e-6
    step: float = 0.5e-3
    imbalance: float = 1.0
    balanced: float = 1.1
    eager: float = 0.1e-3

    def basis_of(self, name: str) -> Basis:
        # DeepEP reports 98 GB/s in low-latency dispatch over H800's 200 GB/s NVLink (EP8). A user
        # who gives --imbalance has measured it.
        given = name == "imbalance" and self.imbalance != 1.0
        return "measured" if given else "derived" if name == "dispatch" else "assumed"


DEFAULT = Assumptions()
