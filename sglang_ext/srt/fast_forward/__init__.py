"""Makes SGLang's model forward cheaper on a CPU without changing what it computes.

Three steps, each of which leaves alone what it does not recognise and counts it:
    dense      decoder stacks of Llama, Qwen2 and Qwen3 run as one flat loop over torch calls
    linears    every other unquantised bf16 linear, and the output head, use packed weights
    fused_ops  SGLang's norms and rotary embedding get shorter torch versions
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from sglang_ext.srt.fast_forward.dense import FlatDecoder, flatten
from sglang_ext.srt.fast_forward.fused_ops import register as register_fused_ops
from sglang_ext.srt.fast_forward.linears import pack_linears, repack
from sglang_ext.srt.fast_forward.memory import packing_fits

logger = logging.getLogger(__name__)
_ATTRIBUTE = "_sglang_ext_fast_forward"


@dataclass(frozen=True)
class Report:
    """What `optimise` did to one model.

    layers: decoder layers that run flat; linears: packed layers outside them, the head included;
    left: reason -> how many layers were left as SGLang's own.
    """

    model: str
    layers: int = 0
    linears: int = 0
    left: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        left = "; ".join(f"{count} left: {reason}" for reason, count in self.left.items())
        done = f"{self.model}: {self.layers} layers flat, {self.linears} linears packed"
        return f"{done}; {left}" if left else done


def optimise(model: nn.Module) -> Report:
    """Called once per loaded model, before memory for K/V is sized."""
    register_fused_ops()
    pack = packing_fits(model)
    decoder, reasons = flatten(model, pack=pack)
    left = dict.fromkeys(reasons, 1)
    owned = decoder.linears if decoder is not None else frozenset()
    linears = 0
    if pack:
        linears, others = pack_linears(model, skip=owned)
        left |= others
    else:
        left["weights stay unpacked: a second copy would not fit in memory"] = 1
    layers = 0 if decoder is None else len(decoder.layers)
    report = Report(type(model).__name__, layers, linears, left)
    setattr(model, _ATTRIBUTE, (report, decoder))
    logger.info("fast forward: %s", report)
    return report


def report_of(model: nn.Module) -> Report | None:
    """The report of an earlier `optimise`, or None."""
    state = getattr(model, _ATTRIBUTE, None)
    return None if state is None else state[0]


class Follower(Protocol):
    """Something that keeps copies of a model's weights, such as a draft that shares its head."""

    def follow(self, model: nn.Module) -> None:
        """Make the copies again if they are of `model`, whose weights were replaced in place."""


_followers: weakref.WeakSet[Follower] = weakref.WeakSet()


def call_on_refresh(follower: Follower) -> None:
    """Have `follower` told, for as long as it lives, when weights were replaced."""
    _followers.add(follower)


def refresh(model: Any) -> None:
    """Pack again after the weights of `model` were replaced in place."""
    for follower in list(_followers):
        follower.follow(model)
    state = getattr(model, _ATTRIBUTE, None)
    if state is None:
        return
    decoder: FlatDecoder | None = state[1]
    if decoder is not None:
        decoder.rebuild()
    repack(model)
