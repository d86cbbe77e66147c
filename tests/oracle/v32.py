"""HF's DeepSeek-V3.2 as oracle, and whole sequences through our model step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from sglang_ext.srt.spec.verify_input import make_verify_input
from tests.adapters.model_world import ModelWorld
from tests.oracle import ties


@contextmanager
def earliest_wins() -> Iterator[None]:
    """HF's indexer with equal scores taken in order; see `tests.oracle.ties`."""
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

    with ties.earliest_wins(DeepseekV32Indexer):
        yield


def load_hf(path: Path) -> Any:
    """The checkpoint in HF's model: every tensor used, none invented."""
    from transformers import DeepseekV32ForCausalLM

    model, info = DeepseekV32ForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    return model.eval()


@torch.no_grad()
def hf_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """[tokens, vocab] of one uncached forward."""
    with earliest_wins():
        return model(torch.tensor([list(ids)]), use_cache=False).logits[0]


@torch.no_grad()
def hf_greedy(model: Any, prompt: Sequence[int], steps: int, stop: int | None = None) -> list[int]:
    """Greedy tokens with HF's own cache."""
    out: list[int] = []
    cache, ids = None, torch.tensor([list(prompt)])
    with earliest_wins():
        for _ in range(steps):
            result = model(ids, past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            out.append(int(result.logits[0, -1].argmax()))
            if out[-1] == stop:
                break
            ids = torch.tensor([[out[-1]]])
    return out


class Sequences:
    """Given tokens of several requests, fed to our model in the pieces a scheduler would use."""

    def __init__(self, world: ModelWorld, sequences: Sequence[Sequence[int]]) -> None:
        self.world, self.sequences = world, [list(s) for s in sequences]
        runner = world.runner
        runner.req_to_token_pool.clear()
        runner.token_to_kv_pool_allocator.clear()
        self.rows = torch.arange(1, len(sequences) + 1)
        self.slots = []
        for row, sequence in zip(self.rows.tolist(), self.sequences, strict=True):
            own = runner.token_to_kv_pool_allocator.alloc(len(sequence))
            # Neighbouring tokens of a request need not be neighbours in the pool.
            own = own[torch.randperm(len(own))]
            runner.req_to_token_pool.req_to_token[row, : len(own)] = own.int()
            self.slots.append(own)
        self.done = [0] * len(sequences)

    def _fields(self, who: Sequence[int], counts: Sequence[int]) -> dict[str, Any]:
        spans = [(r, self.done[r], self.done[r] + n) for r, n in zip(who, counts, strict=True)]
        return {
            "input_ids": torch.tensor([t for r, a, b in spans for t in self.sequences[r][a:b]]),
            "positions": torch.cat([torch.arange(a, b) for _, a, b in spans]),
            "out_cache_loc": torch.cat([self.slots[r][a:b] for r, a, b in spans]),
        }

    def _run(self, mode: ForwardMode, who: Sequence[int], **fields: Any) -> Tensor:
        batch = self.world._batch(mode, self.rows[list(who)], **fields)
        with torch.inference_mode():
            return self.world._forward(batch)[0]

    def extend(self, counts: dict[int, int]) -> dict[int, Tensor]:
        """`counts[r]` prompt tokens of request r; logits [vocab] at the last of them."""
        who, lens = list(counts), list(counts.values())
        prefix = [self.done[r] for r in who]
        total = torch.tensor([p + n for p, n in zip(prefix, lens, strict=True)])
        extend = torch.tensor(lens)
        logits = self._run(
            ForwardMode.EXTEND,
            who,
            **self._fields(who, lens),
            seq_lens=total,
            extend_num_tokens=sum(lens),
            extend_seq_lens=extend.int(),
            extend_seq_lens_cpu=lens,
            extend_prefix_lens=torch.tensor(prefix, dtype=torch.int32),
            extend_prefix_lens_cpu=prefix,
            extend_start_loc=(extend.cumsum(0) - extend).int(),
        )
        self._advance(counts)
        return dict(zip(who, logits, strict=True))

    def decode(self, who: Sequence[int]) -> dict[int, Tensor]:
        """One token of each request in `who`; logits [vocab]."""
        lengths = torch.tensor([self.done[r] + 1 for r in who])
        fields = self._fields(who, [1] * len(who))
        logits = self._run(ForwardMode.DECODE, who, **fields, seq_lens=lengths)
        self._advance(dict.fromkeys(who, 1))
        return dict(zip(who, logits, strict=True))

    def verify(self, counts: dict[int, int], *, commit: dict[int, int]) -> dict[int, Tensor]:
        """`counts[r]` rows of request r, of which `commit[r]` stay; logits [rows, vocab]."""
        who, lens = list(counts), list(counts.values())
        fields = self._fields(who, lens)
        info = make_verify_input(fields["input_ids"], fields["positions"], lens)
        prefix = torch.tensor([self.done[r] for r in who])
        logits = self._run(
            ForwardMode.TARGET_VERIFY, who, **fields, seq_lens=prefix, spec_info=info
        )
        self._advance(commit)
        return dict(zip(who, logits.split(lens), strict=True))

    def _advance(self, counts: dict[int, int]) -> None:
        for request, count in counts.items():
            self.done[request] += count
