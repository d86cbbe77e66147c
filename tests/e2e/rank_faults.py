"""A second rank that has its own mind, and agreements between ranks that are left out.

Ranks that hold the same requests differ, if at all, by a rounding or a clock, which no test can
wait for. Here every odd rank decides otherwise, always, before the ranks agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

STUBBORN = "stubborn second rank"
# A request with custom_params {APART: what} is served without the agreement on that.
APART = "apart"
FIRST_TOKEN, DRAFTS, COUNTS, TOKENS, LENGTHS, GATE = (
    "first token",
    "drafts",
    "counts to verify",
    "tokens",
    "lengths",
    "whether to draft",
)
_SITES = {
    "DFLASH_TARGET": FIRST_TOKEN,
    "DSPARK_DRAFT": DRAFTS,
    "DFLASH_ACCEPT_GREEDY": TOKENS,
    "DFLASH_ACCEPT_SAMPLE": LENGTHS,
}


def _other(tokens: Any) -> Any:
    """Another byte in place of each token; the -1 of an empty place stays."""
    return (tokens + 1).remainder(256).masked_fill(tokens < 0, -1)


class _Mind:
    """What the odd rank decides otherwise, and which agreement the batch at hand goes without."""

    def __init__(self) -> None:
        self.apart = ""
        self.asked = ""

    @property
    def stubborn(self) -> bool:
        return dist.get_rank() % 2 == 1

    def begin(self, right: Callable[..., Any], worker: Any, batch: Any, **kwargs: Any) -> Any:
        params = batch.reqs[0].sampling_params.custom_params if batch.reqs else None
        self.apart = (params or {}).get(APART, "")
        return right(worker, batch, **kwargs)

    def prefill(self, right: Callable[..., Any], target: Any, *args: Any, **kwargs: Any) -> Any:
        result = right(target, *args, **kwargs)
        if self.stubborn and not kwargs.get("is_verify") and result.next_token_ids is not None:
            result.next_token_ids.copy_(_other(result.next_token_ids))
        return result

    def drafts(self, right: Callable[..., bool], pacer: Any, keys: list[str]) -> bool:
        self.asked = GATE
        return right(pacer, keys) != self.stubborn

    def propose(self, right: Callable[..., Any], worker: Any, *args: Any) -> Any:
        proposal = right(worker, *args)
        tokens = _other(proposal.tokens) if self.stubborn else proposal.tokens
        return dataclasses.replace(proposal, tokens=tokens)

    def counts(self, right: Callable[..., list[int]], pacer: Any, *args: Any) -> list[int]:
        """As many rows in all, or the ranks would wait for each other where they disagree."""
        self.asked = COUNTS
        counts = right(pacer, *args)
        return counts[::-1] if self.stubborn else counts

    def accept(self, right: Callable[..., Any], *args: Any) -> Any:
        result = right(*args)
        if not self.stubborn:
            return result
        return dataclasses.replace(
            result, tokens=_other(result.tokens), accepted=result.accepted * 0
        )

    def sync(self, right: Callable[..., Any], sync: Any, site: Any, values: Any) -> Any:
        return values if _SITES.get(site.name) == self.apart else right(sync, site, values)

    def numbers(self, right: Callable[..., Any], numbers: list[int], group: Any) -> list[int]:
        return numbers if self.asked == self.apart else right(numbers, group)


def _second_rank_is_stubborn() -> None:
    """Every odd rank decides otherwise whatever the ranks must agree on."""
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.speculative.spec_tp_sync import SpecTpSync

    from sglang_ext.srt.spec import worker_base
    from sglang_ext.srt.spec.dspark import DSparkWorker
    from sglang_ext.srt.spec.pacing import Pacer

    mind = _Mind()
    for owner, name, wrapper in (
        (worker_base.BlockSpecWorker, "forward_batch_generation", mind.begin),
        (TpModelWorker, "forward_batch_generation", mind.prefill),
        (Pacer, "drafts", mind.drafts),
        (DSparkWorker, "propose", mind.propose),
        (Pacer, "lengths", mind.counts),
        (worker_base, "accept", mind.accept),
        (SpecTpSync, "sync", mind.sync),
        (worker_base, "same_on_all_ranks", mind.numbers),
    ):
        _wrap(owner, name, wrapper)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    right = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: wrapper(right, *args, **kwargs))


RANK_FAULTS: dict[str, Callable[[], None]] = {STUBBORN: _second_rank_is_stubborn}
