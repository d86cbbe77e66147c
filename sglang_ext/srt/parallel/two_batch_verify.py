"""Two-batch overlap of a verification of chains: of our worker, or of NEXTN.

    SGLang   halves by requests of one width, and splits the tree fields of an EAGLE input
    here     a verification is cut like a prefill: between the requests that balance its rows best,
             or inside one request, whose later rows see the earlier ones as prefix
The difference absorbed here: the cut, both halves' rows per request and prefix lengths. Padding of
the data-parallel gather goes to the second half. (`core/batch_split.py` has the rule.)
"""

from __future__ import annotations

from typing import Any

from sglang.srt.batch_overlap.two_batch_overlap import TboForwardBatchPreparer
from sglang.srt.layers.moe import get_tbo_token_distribution_threshold
from sglang.srt.speculative.eagle_info import EagleVerifyInput

from sglang_ext.core.batch_split import Halves, split_by_tokens
from sglang_ext.srt.parallel.seen import note
from sglang_ext.srt.spec.verify_input import RaggedVerifyInput, make_verify_input


def verifies_chains(batch: Any) -> bool:
    """Whether `batch` is to be split, and verifies chains (idle ranks included)."""
    verify = batch.spec_info
    chain = isinstance(verify, EagleVerifyInput) and verify.topk == 1
    return batch.tbo_split_seq_index is not None and (
        chain or isinstance(verify, RaggedVerifyInput)
    )


def _rows(verify: Any) -> list[int]:
    """Rows of every request, padding left out."""
    if isinstance(verify, RaggedVerifyInput):
        return verify.verify_lens
    width = verify.draft_token_num
    return [width] * (len(verify.draft_token) // width)


def split(batch: Any) -> None:
    """Give a verification its two halves, `batch.tbo_children`.

    batch: padded as it will run. Our worker counts its requests by rows (`spec.ranks.set_rows`).
    """
    verify, lens = batch.spec_info, _rows(batch.spec_info)
    halves = split_by_tokens(lens, get_tbo_token_distribution_threshold())
    note("two-batch split of a verification")
    if halves.inside is not None:
        note("two-batch split inside a verified request")
    if halves.total and not (halves.tokens and halves.second):
        note("two-batch split with an empty half")
    preparer = TboForwardBatchPreparer
    real = preparer._get_num_token_non_padded_cpu(batch)
    counts = preparer._split_num_token_non_padded(
        tbo_split_token_index=halves.tokens, num_token_non_padded=real
    )
    on_device = preparer.compute_tbo_children_num_token_non_padded_raw(halves.tokens, real)
    shared = 0 if halves.inside is None else 1
    requests = (slice(0, halves.requests), slice(halves.requests - shared, batch.batch_size))
    rows = (slice(0, halves.tokens), slice(halves.tokens, batch.input_ids.shape[0]))
    # SGLang's own split of a speculative input knows trees alone.
    batch.spec_info = None
    try:
        batch.tbo_children = [
            preparer.filter_batch(
                batch,
                start_token_index=rows[i].start,
                end_token_index=rows[i].stop,
                start_seq_index=requests[i].start,
                end_seq_index=requests[i].stop,
                out_num_token_non_padded=on_device[i],
                out_num_token_non_padded_cpu=counts[i],
            )
            for i in range(2)
        ]
    finally:
        batch.spec_info = verify
    for child, lengths in zip(batch.tbo_children, _lengths(lens, halves), strict=True):
        first, last = child.tbo_parent_token_range
        child.spec_info = make_verify_input(
            batch.input_ids[first:last], batch.positions[first:last], lengths
        )
    if halves.inside is not None:
        first_half, second_half = batch.tbo_children
        rows_there = lens[halves.requests - 1] - halves.inside
        counted = rows_there if isinstance(verify, RaggedVerifyInput) else 0
        _share_request(first_half, second_half, halves.inside, counted)


def _lengths(rows: list[int], halves: Halves) -> tuple[list[int], list[int]]:
    """Rows per request of either half."""
    if halves.inside is None:
        return rows[: halves.requests], rows[halves.requests :]
    before, cut, after = (
        rows[: halves.requests - 1],
        rows[halves.requests - 1],
        rows[halves.requests :],
    )
    return [*before, halves.inside], [cut - halves.inside, *after]


def _share_request(first: Any, second: Any, inside: int, counted: int) -> None:
    """The request at the cut: its first `inside` rows are prefix to the second half.

    A verification's seq_lens leave its rows out.
    counted: rows of the second half that seq_lens_cpu count; our worker's do, NEXTN's do not.
    """
    second.seq_lens = second.seq_lens.clone()
    second.seq_lens[0] += inside
    if second.seq_lens_cpu is not None and not counted:
        second.seq_lens_cpu = second.seq_lens_cpu.clone()
        second.seq_lens_cpu[0] += inside
        second.seq_lens_sum = int(second.seq_lens_cpu.sum())
    if first.seq_lens_cpu is not None and counted:
        first.seq_lens_cpu = first.seq_lens_cpu.clone()
        first.seq_lens_cpu[-1] -= counted
        first.seq_lens_sum = int(first.seq_lens_cpu.sum())
