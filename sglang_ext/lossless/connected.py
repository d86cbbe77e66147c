"""Servers that already run, as the two sides of a check."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from sglang_ext.lossless.endpoint import Endpoint, connect
from sglang_ext.lossless.errors import CannotTest
from sglang_ext.lossless.flow import Opened, Side
from sglang_ext.lossless.sglang_endpoint import SGLangEndpoint


def both(base: str, spec: str, key: str | None = None, api: str = "auto") -> Opened:
    """Two endpoints. Raises CannotTest where the base says that it speculates."""
    sides = {side: connect(u, key=key, api=api) for side, u in zip(Side, (base, spec), strict=True)}
    if sides[Side.BASE].facts.algorithm:
        raise CannotTest(
            "--base",
            expected="a server without speculation",
            found=f"--speculative-algorithm {sides[Side.BASE].facts.algorithm}",
            remedy="Exchange --base and --spec, or use --self for a server of sglang-ext.",
        )
    if sides[Side.SPEC].facts.algorithm == "":
        raise CannotTest(
            "--spec",
            expected="a server with speculation",
            found="no --speculative-algorithm",
            remedy="Start it with one, or give another server.",
        )
    return _opened(sides)


def itself(url: str, key: str | None = None) -> Opened:
    """One server of sglang-ext, asked with and without `custom_params.speculative`."""
    spec = connect(url, key=key)
    if not isinstance(spec, SGLangEndpoint) or not spec.facts.algorithm:
        raise CannotTest(
            "--self",
            expected="an SGLang server with --speculative-algorithm DSPARK or DFLASH",
            found=f"{spec.facts.engine}, algorithm {spec.facts.algorithm or 'none'}",
            remedy="Give --base and --spec.",
        )
    return _opened({Side.BASE: spec.without_drafts(), Side.SPEC: spec})


def _opened(sides: dict[Side, Endpoint]) -> Opened:
    def opened(side: Side) -> AbstractContextManager[Endpoint]:
        return nullcontext(sides[side])

    return opened
