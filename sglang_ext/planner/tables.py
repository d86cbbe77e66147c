"""The published tables as rows of text, as JSON and as plots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_ext.launcher.errors import ConfigError
from sglang_ext.planner import published
from sglang_ext.planner.numbers import Basis


@dataclass(frozen=True)
class PublishedTable:
    """columns and rows as printed; records: the same unrounded, for JSON

    basis: `derived` from the published example's constants, `assumed` where it needs acceptance
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    records: list[dict[str, Any]]
    basis: Basis

    def as_json(self) -> list[dict[str, Any]]:
        return [record | {"basis": self.basis} for record in self.records]


def mtp() -> PublishedTable:
    rows = published.mtp_table()
    return PublishedTable(
        "MTP: tokens/s per H100, and the gain with 1, 2, 3 drafts (acceptance .85, .75, .65)",
        ("context", "requests", "tok/s", "k=1", "k=2", "k=3"),
        [
            (str(r.context), str(r.requests), f"{r.base:.0f}", *(f"{g:.2f}x" for g in r.gains))
            for r in rows
        ],
        [asdict(r) for r in rows],
        "assumed",
    )


def break_even() -> PublishedTable:
    rows = published.break_even_table()
    return PublishedTable(
        "Break-even: accepted drafts per round that drafting needs to gain; impossible where more "
        "than are drafted",
        ("context", "requests", "drafts", "base ms", "step ms", "ratio", "needed"),
        [
            (
                str(r.context),
                str(r.requests),
                str(r.drafts),
                f"{r.base_ms:.4f}",
                f"{r.step_ms:.4f}",
                f"{r.ratio:.4f}",
                f"{r.needed:.4f}" if r.possible else f"{r.needed:.4f} (impossible)",
            )
            for r in rows
        ],
        [asdict(r) | {"ratio": r.ratio, "needed": r.needed, "possible": r.possible} for r in rows],
        "derived",
    )


def dsa() -> PublishedTable:
    rows = published.dsa_table()
    columns = ("context", "decode GFLOP", "", "decode MiB", "", "prefill TFLOP", "")
    return PublishedTable(
        "DSA against dense attention, per layer: dense -> DSA (ratio)",
        columns,
        [
            (
                f"{r.context // 1024}K",
                *_pair(r.decode_gflop, 2),
                *_pair(r.decode_mib, 1),
                *_pair(r.prefill_tflop, 1),
            )
            for r in rows
        ],
        [asdict(r) for r in rows],
        "derived",
    )


def _pair(values: tuple[float, float], digits: int) -> tuple[str, str]:
    dense, sparse = values
    return f"{dense:.{digits}f} -> {sparse:.{digits}f}", f"{dense / sparse:.1f}x"


def schedule() -> PublishedTable:
    rows = published.schedule_table()
    return PublishedTable(
        "Algorithm 1 of DSpark, one request: admit while tokens per second rise",
        ("drafts", "survival", "rows", "expected", "steps/s", "tok/s", "decision"),
        [
            (
                str(r.drafts),
                f"{r.survival:.6g}",
                str(r.rows),
                f"{r.expected:.6g}",
                f"{r.speed:g}",
                f"{r.tokens_per_second:.8g}",
                r.decision,
            )
            for r in rows
        ],
        [asdict(r) | {"tokens_per_second": r.tokens_per_second} for r in rows],
        "assumed",
    )


TABLES: dict[str, Callable[[], PublishedTable]] = {
    "mtp": mtp,
    "break-even": break_even,
    "dsa": dsa,
    "schedule": schedule,
}


def plot(name: str, path: Path) -> None:
    """Draws one table; the format follows the file's suffix.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ConfigError(
            "plan",
            "--plot",
            expected="matplotlib",
            found="not installed",
            remedy="pip install 'sglang-ext[plots]'.",
        ) from error
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    axes.set_title(TABLES[name]().title, fontsize=9)
    _DRAWERS[name](axes)
    figure.savefig(path)
    pyplot.close(figure)


def _draw_mtp(axes: Any) -> None:
    for r in published.mtp_table():
        axes.plot((1, 2, 3), r.gains, marker="o", label=f"{r.context} tokens, {r.requests} req")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(xlabel="drafts", ylabel="gain in throughput", xticks=(1, 2, 3))
    axes.legend(fontsize=8)


def _draw_break_even(axes: Any) -> None:
    rows = published.break_even_table()
    labels = [f"{c}, {b}" for c, b in published.POINTS]
    for k in (1, 2, 3):
        shown = [r for r in rows if r.drafts == k]
        places = [i + (k - 2) * 0.25 for i in range(len(labels))]
        hatches = ["" if r.possible else "xx" for r in shown]
        axes.bar(places, [r.needed for r in shown], 0.25, label=f"{k} drafted", hatch=hatches)
    axes.set_xticks(range(len(labels)), labels)
    axes.set(
        xlabel="context, requests per GPU (crossed: impossible)",
        ylabel="accepted drafts needed per round",
    )
    axes.legend(fontsize=8)


def _draw_dsa(axes: Any) -> None:
    rows = published.dsa_table()
    contexts = [r.context for r in rows]
    for label, pick in (
        ("decode FLOP", "decode_gflop"),
        ("decode bytes", "decode_mib"),
        ("prefill FLOP", "prefill_tflop"),
    ):
        ratios = [getattr(r, pick)[0] / getattr(r, pick)[1] for r in rows]
        axes.plot(contexts, ratios, marker="o", label=label)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="context", ylabel="dense / DSA")
    axes.legend(fontsize=8)


def _draw_schedule(axes: Any) -> None:
    rows = published.schedule_table()
    axes.plot([r.drafts for r in rows], [r.tokens_per_second for r in rows], marker="o")
    axes.set(xlabel="drafts verified", ylabel="expected tokens per second")
    axes.set_xticks([r.drafts for r in rows])


_DRAWERS: dict[str, Callable[[Any], None]] = {
    "mtp": _draw_mtp,
    "break-even": _draw_break_even,
    "dsa": _draw_dsa,
    "schedule": _draw_schedule,
}
