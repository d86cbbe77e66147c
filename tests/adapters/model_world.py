"""One ModelRunner in this process, without scheduler or server, and whole forwards through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from torch import Tensor

from bench.model_rank import forward_batch, model_rank
from sglang_ext.srt.spec.verify_input import make_verify_input


@contextmanager
def model_world(path: Path, dtype: str, **more: Any) -> Iterator[ModelWorld]:
    """Load the checkpoint as a server's model rank does; leaves no process group behind.

    more: further arguments of the server.
    """
    with model_rank(path, dtype, **more) as runner:
        yield ModelWorld(runner)


class ModelWorld:
    """Requests laid out by hand in the runner's pools."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.model = runner, runner.model

    def _place(self, requests: Sequence[object], room: int) -> tuple[Tensor, Tensor]:
        """(request rows, slots [requests, room]) of fresh requests."""
        self.runner.req_to_token_pool.clear()
        self.runner.token_to_kv_pool_allocator.clear()
        rows = torch.arange(1, len(requests) + 1)
        slots = self.runner.token_to_kv_pool_allocator.alloc(len(requests) * room)
        slots = slots.view(len(requests), room)
        self.runner.req_to_token_pool.req_to_token[rows, :room] = slots.int()
        return rows, slots

    def _batch(self, mode: ForwardMode, rows: Tensor, **fields: Any) -> ForwardBatch:
        return forward_batch(mode, rows, **fields)

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]], drafts: Sequence[int]) -> list[Tensor]:
        """Extend, one decode step and one verify of `drafts[r]` rows for each request.

        Returns logits and captured hidden states of the three forwards.
        """
        lengths = torch.tensor([len(p) for p in prompts])
        rows, slots = self._place(prompts, int(lengths.max()) + 16)
        out = self._extend(prompts, rows, slots, lengths)
        ids = torch.tensor([p[0] for p in prompts])
        step = self._batch(
            ForwardMode.DECODE,
            rows,
            input_ids=ids,
            positions=lengths,
            seq_lens=lengths + 1,
            out_cache_loc=slots[torch.arange(len(prompts)), lengths],
        )
        out += self._forward(step)
        return out + self._verify(rows, slots, lengths + 1, drafts)

    def prepared(self, context: int, rows: int) -> Callable[[], Tensor]:
        """A verify pass of `rows` rows behind a prefix of `context` tokens, to call repeatedly."""
        table, slots = self._place([0], context + rows)
        for buffer in (
            *self.runner.token_to_kv_pool.k_buffer,
            *self.runner.token_to_kv_pool.v_buffer,
        ):
            buffer[slots[0, :context]] = torch.randn_like(buffer[slots[0, :context]])
        return lambda: self._again(table, slots, torch.tensor([context]), rows)

    @torch.inference_mode()
    def _again(self, table: Tensor, slots: Tensor, prefix: Tensor, rows: int) -> Tensor:
        return self._verify(table, slots, prefix, [rows])[0]

    def _extend(
        self, prompts: Sequence[Sequence[int]], rows: Tensor, slots: Tensor, lengths: Tensor
    ) -> list[Tensor]:
        counts = lengths.tolist()
        batch = self._batch(
            ForwardMode.EXTEND,
            rows,
            input_ids=torch.tensor([t for p in prompts for t in p]),
            positions=torch.cat([torch.arange(n) for n in counts]),
            seq_lens=lengths,
            out_cache_loc=torch.cat([slots[r, :n] for r, n in enumerate(counts)]),
            extend_num_tokens=sum(counts),
            extend_seq_lens=lengths.int(),
            extend_seq_lens_cpu=counts,
            extend_prefix_lens=torch.zeros(len(counts), dtype=torch.int32),
            extend_prefix_lens_cpu=[0] * len(counts),
            extend_start_loc=(lengths.cumsum(0) - lengths).int(),
        )
        return self._forward(batch)

    def _verify(
        self, rows: Tensor, slots: Tensor, prefix: Tensor, drafts: Sequence[int]
    ) -> list[Tensor]:
        positions = torch.cat(
            [torch.arange(int(n), int(n) + r) for n, r in zip(prefix, drafts, strict=True)]
        )
        request = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(drafts))
        ids = (positions * 7 + request) % 250
        batch = self._batch(
            ForwardMode.TARGET_VERIFY,
            rows,
            input_ids=ids,
            positions=positions,
            seq_lens=prefix,
            out_cache_loc=slots[request, positions],
            spec_info=make_verify_input(ids, positions, list(drafts)),
        )
        return self._forward(batch)

    def _forward(self, batch: ForwardBatch) -> list[Tensor]:
        out = self.runner.forward(batch).logits_output
        found = [out.next_token_logits.float()]
        return found if out.hidden_states is None else [*found, out.hidden_states.float()]
