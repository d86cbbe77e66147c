"""Confidence temperatures from recorded logits (sequential temperature scaling).

Read are the JSON lines of a server of ours and the `.pt` shards of SGLang's own worker, both
written under SGLANG_DSPARK_STS_COLLECT_PATH.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_ext.core.spec.calibration import StsTemperatures, fit_temperatures
from sglang_ext.core.spec.confidence import survivals
from sglang_ext.lossless.errors import CannotTest

_REMEDY = "Record again with SGLANG_DSPARK_STS_COLLECT_PATH, or take the file out."
# Below this a temperature is fitted to noise.
LEAST_ROUNDS = 200


@dataclass(frozen=True)
class Recorded:
    """logits, prefix_mask: [n, G]; prefix_mask is 1 where the draft was accepted."""

    logits: Tensor
    prefix_mask: Tensor


def read(paths: Sequence[Path]) -> Recorded:
    """All files, and all files of the folders, together. Raises CannotTest."""
    files = [file for path in paths for file in _files(path)]
    parts = [_read_shard(file) if file.suffix == ".pt" else _read_lines(file) for file in files]
    widths = {part.logits.shape[1] for part in parts}
    if len(widths) > 1:
        raise CannotTest(
            "logits", expected="one number of drafts", found=sorted(widths), remedy=_REMEDY
        )
    found = Recorded(
        torch.cat([part.logits for part in parts]), torch.cat([part.prefix_mask for part in parts])
    )
    if len(found.logits) < LEAST_ROUNDS:
        raise CannotTest(
            "rounds",
            expected=f"at least {LEAST_ROUNDS}",
            found=len(found.logits),
            remedy="Send more requests while the server records.",
        )
    return found


def fit(recorded: Recorded, name: str) -> StsTemperatures:
    """One temperature per position."""
    return fit_temperatures(recorded.logits, recorded.prefix_mask, name)


@dataclass(frozen=True)
class Reliability:
    """Predicted against observed survival of one position, by bin of the prediction.

    counts, predicted, observed: one per bin that is not empty
    """

    counts: list[int]
    predicted: list[float]
    observed: list[float]


def reliability(
    recorded: Recorded, temperatures: Tensor | None, bins: int = 15
) -> list[Reliability]:
    """One diagram per position; temperatures [G], None for the logits as they are."""
    chances = survivals(recorded.logits.double(), temperatures)
    diagrams = []
    for k in range(chances.shape[1]):
        at = (chances[:, k] * bins).long().clamp_(max=bins - 1)
        rows = [(chances[at == b, k], recorded.prefix_mask[at == b, k]) for b in range(bins)]
        kept = [(p, happened.double()) for p, happened in rows if len(p)]
        diagrams.append(
            Reliability(
                [len(p) for p, _ in kept],
                [float(p.mean()) for p, _ in kept],
                [float(h.mean()) for _, h in kept],
            )
        )
    return diagrams


def plot(recorded: Recorded, fitted: StsTemperatures, path: Path) -> None:
    """Reliability before and after, a panel per position. Raises CannotTest without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise CannotTest(
            "--plot", expected="matplotlib", found="none", remedy="pip install matplotlib."
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    gamma = recorded.logits.shape[1]
    before = reliability(recorded, None)
    after = reliability(recorded, fitted.tensor(gamma).double())
    figure, panels = pyplot.subplots(
        1, gamma, figsize=(2.6 * gamma, 2.8), sharey=True, layout="constrained", squeeze=False
    )
    for k, axes in enumerate(panels[0]):
        axes.plot([0, 1], [0, 1], color="black", linewidth=0.7)
        axes.plot(before[k].predicted, before[k].observed, "o-", markersize=3, label="before")
        axes.plot(after[k].predicted, after[k].observed, "s-", markersize=3, label="after")
        errors = f"ECE {fitted.ece_before[k]:.3f} to {fitted.ece_after[k]:.3f}"
        axes.set(title=f"draft {k + 1}\n{errors}", xlabel="predicted survival")
    panels[0][0].set_ylabel("observed")
    panels[0][0].legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(f for f in path.iterdir() if f.suffix in (".jsonl", ".pt"))
    else:
        found = [path] if path.is_file() else []
    if not found:
        raise CannotTest(
            str(path), expected="a .jsonl or .pt file, or a folder", found="none", remedy=_REMEDY
        )
    return found


def _read_shard(file: Path) -> Recorded:
    try:
        raw = torch.load(file, map_location="cpu", weights_only=True)
        logits, mask = raw["logits"].float(), raw["prefix_mask"].float()
    except Exception as error:
        raise CannotTest(
            str(file), expected="logits and prefix_mask", found=error, remedy=_REMEDY
        ) from error
    told = logits.dim() == 2 and logits.numel() and logits.shape == mask.shape
    if not (told and torch.isfinite(logits).all() and ((mask == 0) | (mask == 1)).all()):
        raise CannotTest(
            str(file),
            expected="finite logits [n, G] and a mask of zeros and ones of the same shape",
            found=(tuple(logits.shape), tuple(mask.shape)),
            remedy=_REMEDY,
        )
    return Recorded(logits, mask)


def _read_lines(file: Path) -> Recorded:
    lines = list(_rows(file))
    if not lines:
        raise CannotTest(str(file), expected="a round a line", found="none", remedy=_REMEDY)
    width = len(lines[0][0])
    for number, (row, _) in enumerate(lines, start=1):
        if len(row) != width:
            raise _bad_line(file, number, f"{width} logits, as line 1 has", len(row))
    logits = torch.tensor([row for row, _ in lines], dtype=torch.float32).view(len(lines), width)
    accepted = torch.tensor([kept for _, kept in lines])
    mask = (torch.arange(width) < accepted.view(-1, 1)).float()
    return Recorded(logits, mask.view(len(lines), width))


def _rows(file: Path) -> Iterator[tuple[list[float], int]]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CannotTest(str(file), expected="a text file", found=error, remedy=_REMEDY) from error
    for number, line in enumerate(lines, start=1):
        try:
            row: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _bad_line(file, number, "JSON", error) from error
        logits = row.get("logits") if isinstance(row, dict) else None
        kept = row.get("accepted") if isinstance(row, dict) else None
        if not isinstance(logits, list) or not logits or not all(map(_is_number, logits)):
            raise _bad_line(file, number, "logits, a list of numbers that float32 holds", logits)
        if isinstance(kept, bool) or not isinstance(kept, int) or not 0 <= kept <= len(logits):
            raise _bad_line(file, number, f"accepted, 0 to {len(logits)}", kept)
        yield logits, kept


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) <= torch.finfo(torch.float32).max


def _bad_line(file: Path, number: int, expected: str, found: object) -> CannotTest:
    return CannotTest(f"{file}, line {number}", expected=expected, found=found, remedy=_REMEDY)
