"""Sequential temperature scaling (STS) of the confidence head (arXiv:2607.05147, 3.2.1).

Temperatures are fitted position by position, on raw logits recorded while every draft was
verified: T_k minimises the calibration error of the survival of position k, given T_1 .. T_{k-1}.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from sglang_ext.core.spec.confidence import survivals
from sglang_ext.core.spec.errors import TableError, TableReader, write_table

_NAME = "STS file"
_REMEDY = "Fit the temperatures again for this draft, or start without the file."
_GRID_POINTS = 41
_BINS = 15


@dataclass(frozen=True)
class StsTemperatures:
    """Temperatures of one draft.

    temperatures: [G], > 0
    ece_before, ece_after: [G] calibration error of each position's survival, [] if unknown
    """

    temperatures: tuple[float, ...]
    dataset: str = ""
    num_samples: int = 0
    ece_before: tuple[float, ...] = ()
    ece_after: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.temperatures or not all(0.0 < t < float("inf") for t in self.temperatures):
            raise _error("temperatures", "at least one number above 0", list(self.temperatures))
        for field in ("ece_before", "ece_after"):
            if len(getattr(self, field)) not in (0, len(self.temperatures)):
                raise _error(
                    field,
                    f"none or {len(self.temperatures)} numbers, one per position",
                    list(getattr(self, field)),
                )

    def tensor(self, gamma: int) -> Tensor:
        """[gamma] fp32. Raises TableError when the file covers fewer positions."""
        if len(self.temperatures) < gamma:
            raise _error(
                "temperatures", f"at least {gamma} (gamma)", f"{len(self.temperatures)} numbers"
            )
        return torch.tensor(self.temperatures[:gamma], dtype=torch.float32)

    def save(self, path: str | Path) -> None:
        write_table(path, asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> StsTemperatures:
        """Reads a JSON file; `temperatures` is the only field that must be there."""
        read = TableReader(_NAME, path, _REMEDY)
        read.refuse_unknown(set(cls.__dataclass_fields__))
        return cls(
            temperatures=tuple(read.numbers("temperatures")),
            dataset=read.text("dataset") if "dataset" in read.raw else "",
            num_samples=read.whole("num_samples") if "num_samples" in read.raw else 0,
            ece_before=tuple(read.numbers("ece_before")) if "ece_before" in read.raw else (),
            ece_after=tuple(read.numbers("ece_after")) if "ece_after" in read.raw else (),
        )


def fit_temperatures(logits: Tensor, prefix_mask: Tensor, dataset: str = "") -> StsTemperatures:
    """Fits one temperature per position over 41 log-spaced values in 0.1 .. 10.

    logits:      [n, G] raw confidence logits, n >= 1
    prefix_mask: [n, G], 1 where the position was accepted, all drafts having been verified
    """
    if logits.shape != prefix_mask.shape or logits.dim() != 2 or logits.shape[0] == 0:
        raise _error(
            "prefix_mask",
            f"the shape of the logits, {tuple(logits.shape)}, not empty",
            tuple(prefix_mask.shape),
        )
    grid = torch.logspace(-1.0, 1.0, _GRID_POINTS, dtype=torch.float64)
    logits, reached = logits.double(), torch.ones(logits.shape[0], dtype=torch.float64)
    raw = survivals(logits)
    chosen, before, after = [], [], []
    for k in range(logits.shape[1]):
        trials = reached[:, None] * torch.sigmoid(logits[:, k : k + 1] / grid)
        errors = [calibration_error(trial, prefix_mask[:, k]) for trial in trials.unbind(1)]
        best = min(range(_GRID_POINTS), key=errors.__getitem__)
        chosen.append(float(grid[best]))
        before.append(calibration_error(raw[:, k], prefix_mask[:, k]))
        after.append(errors[best])
        reached = trials[:, best]
    return StsTemperatures(tuple(chosen), dataset, logits.shape[0], tuple(before), tuple(after))


def calibration_error(predicted: Tensor, happened: Tensor, bins: int = _BINS) -> float:
    """Expected calibration error over equal-width bins of [0, 1].

    predicted: [n] in [0, 1], happened: [n] 0 or 1
    """
    predicted, happened = predicted.double(), happened.double()
    at = (predicted * bins).long().clamp_(max=bins - 1)
    gaps = torch.zeros(bins, dtype=torch.float64).index_add_(0, at, happened - predicted)
    return float(gaps.abs().sum() / len(predicted))


def _error(field: str, expected: str, found: object) -> TableError:
    return TableError(_NAME, field, expected=expected, found=found, remedy=_REMEDY)
