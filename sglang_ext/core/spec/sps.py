"""How long a verification takes: the speed tables the scheduler consults.

Two file formats are read, those of SGLang's profiler: steps per second against batch tokens, and
an additive model of requests and tokens. The paper's SPS(B) is 1 / seconds (arXiv:2607.05147,
3.2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_ext.core.spec.errors import TableError, TableReader, write_table

Array = NDArray[np.float64]

_NAME = "SPS table"
_REMEDY = "Measure the table again, or start without one to verify every draft."


class SpeedTable(Protocol):
    """What the scheduler needs to know about the machine."""

    def seconds(self, requests: int, most: int) -> Array:
        """[most - requests + 1] step time at B = requests .. most verify rows."""
        ...


@dataclass(frozen=True)
class SpsTable:
    """Steps per second at sampled batch sizes; between samples the lower one holds.

    sample_batch_tokens:  strictly increasing, at least 1
    sample_steps_per_sec: one per sample, > 0
    max_batch_tokens:     at least the largest sample
    """

    sample_batch_tokens: tuple[int, ...]
    sample_steps_per_sec: tuple[float, ...]
    max_batch_tokens: int

    def __post_init__(self) -> None:
        _check_probes("sample_batch_tokens", self.sample_batch_tokens)
        _check_values(
            "sample_steps_per_sec", self.sample_steps_per_sec, len(self.sample_batch_tokens), 1e-9
        )
        if self.max_batch_tokens < self.sample_batch_tokens[-1]:
            raise _error(
                "max_batch_tokens",
                f"at least the largest sample, {self.sample_batch_tokens[-1]}",
                self.max_batch_tokens,
            )

    @classmethod
    def from_seconds(cls, seconds: dict[int, float]) -> SpsTable:
        """From measured step times {batch tokens: seconds}.

        Interpolated to every size in between, because a staircase would stop the scheduler at
        its first step, and made non-decreasing, because a measurement is noisy.
        """
        sampled = sorted(seconds)
        _check_probes("sample_batch_tokens", sampled)
        rising = np.maximum.accumulate([seconds[b] for b in sampled])
        sizes = np.arange(sampled[0], sampled[-1] + 1)
        rates = 1.0 / np.interp(sizes, sampled, rising)
        return cls(tuple(sizes.tolist()), tuple(rates.tolist()), sampled[-1])

    @cached_property
    def _dense(self) -> Array:
        """Seconds at 0, 1, ... last sample."""
        edges = np.asarray(self.sample_batch_tokens)
        at = np.searchsorted(edges, np.arange(edges[-1] + 1), side="right") - 1
        return 1.0 / np.asarray(self.sample_steps_per_sec)[np.maximum(at, 0)]

    def seconds(self, requests: int, most: int) -> Array:
        dense = self._dense
        if most < len(dense):
            return dense[requests : most + 1]
        return dense[np.minimum(np.arange(requests, most + 1), len(dense) - 1)]

    def save(self, path: str | Path) -> None:
        write_table(path, asdict(self))


@dataclass(frozen=True)
class AdditiveTable:
    """Step time as bias + alpha(requests) + theta(batch tokens), both interpolated and clamped.

    bs_probes / alpha_seconds: requests and their share;  m_probes / theta_seconds: batch tokens
    """

    bias_seconds: float
    bs_probes: tuple[int, ...]
    alpha_seconds: tuple[float, ...]
    m_probes: tuple[int, ...]
    theta_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 0.0 < self.bias_seconds < float("inf"):
            raise _error("bias_seconds", "a time above 0", self.bias_seconds)
        _check_probes("bs_probes", self.bs_probes)
        _check_values("alpha_seconds", self.alpha_seconds, len(self.bs_probes), 0.0)
        _check_probes("m_probes", self.m_probes)
        _check_values("theta_seconds", self.theta_seconds, len(self.m_probes), 0.0)

    def seconds(self, requests: int, most: int) -> Array:
        alpha = np.interp(requests, self.bs_probes, self.alpha_seconds)
        theta = np.interp(np.arange(requests, most + 1), self.m_probes, self.theta_seconds)
        return self.bias_seconds + alpha + theta

    def save(self, path: str | Path) -> None:
        write_table(path, asdict(self))


def load_table(path: str | Path) -> SpsTable | AdditiveTable:
    """Reads either format. Raises TableError."""
    read = TableReader(_NAME, path, _REMEDY)
    if "bias_seconds" in read.raw:
        read.refuse_unknown(set(AdditiveTable.__dataclass_fields__))
        return AdditiveTable(
            bias_seconds=read.number("bias_seconds"),
            bs_probes=tuple(read.wholes("bs_probes")),
            alpha_seconds=tuple(read.numbers("alpha_seconds")),
            m_probes=tuple(read.wholes("m_probes")),
            theta_seconds=tuple(read.numbers("theta_seconds")),
        )
    read.refuse_unknown(set(SpsTable.__dataclass_fields__))
    return SpsTable(
        sample_batch_tokens=tuple(read.wholes("sample_batch_tokens")),
        sample_steps_per_sec=tuple(read.numbers("sample_steps_per_sec")),
        max_batch_tokens=read.whole("max_batch_tokens"),
    )


def _error(field: str, expected: str, found: object) -> TableError:
    return TableError(_NAME, field, expected=expected, found=found, remedy=_REMEDY)


def _check_probes(field: str, probes: Sequence[int]) -> None:
    rising = all(a < b for a, b in pairwise(probes))
    if not probes or probes[0] < 1 or not rising:
        raise _error(field, "at least one whole number >= 1, strictly increasing", list(probes))


def _check_values(field: str, values: Sequence[float], count: int, least: float) -> None:
    if len(values) != count or not all(least <= v < float("inf") for v in values):
        raise _error(field, f"{count} finite numbers of at least {least:g}", list(values))
