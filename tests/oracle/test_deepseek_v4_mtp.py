"""Our MTP module of DeepSeek-V4 against one written naively, guess by guess.

The model rank is real (loader, token pool, attention backends, MoE); SGLang's EAGLE worker is
played: a prompt in chunks, then rounds of a chain through the cache and of rows that are partly
rejected.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleDraftInput
from torch import Tensor, nn

from sglang_ext.srt.attention.dsv4 import Dsv4AttnBackend
from sglang_ext.srt.attention.slot_backend import SlotChainBackend
from sglang_ext.srt.models import deepseek_v4_nextn
from sglang_ext.srt.models.deepseek_v4_config import OFFICIAL_MODULE
from sglang_ext.tiny_model.deepseek_v4 import write
from tests.adapters.model_world import ModelWorld, model_world
from tests.oracle.v4_mtp import NaiveModule, chain

pytestmark = pytest.mark.oracle

TOLERANCE = 1e-4
LENGTHS = (2, 5, 19, 38)
ROUNDS, WIDEST = 3, 5
CONFIGURATIONS: tuple[dict[str, Any], ...] = (
    {"sliding_window": 7, "hc_sinkhorn_iters": 1, "num_hash_layers": 1},
    {"sliding_window": 16, "hc_mult": 2, "o_groups": 1, "swiglu_limit": 0.5, "q_lora_rank": 7},
    {"sliding_window": 1, "hidden_size": 48, "num_attention_heads": 6, "o_groups": 3},
    {"sliding_window": 128, "n_routed_experts": 3, "num_experts_per_tok": 3, "head_dim": 16},
)


class Requests:
    """Rows of the module for several requests at once.

    following: per request, the token behind each of its tokens. streams: [tokens, n, hidden].
    """

    def __init__(
        self, world: ModelWorld, following: list[list[int]], streams: list[Tensor]
    ) -> None:
        self.world, self.following, self.streams = world, following, streams
        runner = world.runner
        runner.req_to_token_pool.clear()
        runner.token_to_kv_pool_allocator.clear()
        self.rows = torch.arange(1, len(following) + 1)
        self.slots = []
        for row, ids in zip(self.rows.tolist(), following, strict=True):
            own = runner.token_to_kv_pool_allocator.alloc(len(ids) + WIDEST)
            # Neighbouring tokens of a request need not be neighbours in the pool.
            own = own[torch.randperm(len(own))]
            runner.req_to_token_pool.req_to_token[row, : len(own)] = own.int()
            self.slots.append(own)
        self.done = [0] * len(following)

    def extend(self, counts: list[int], mode: ForwardMode, wrong: int = 0) -> list[list[Tensor]]:
        """Logits and streams of `counts[r]` rows each; the last `wrong` of them are of no text."""
        spans = [(d, d + n) for d, n in zip(self.done, counts, strict=True)]
        ids = [self.following[r][a:b] for r, (a, b) in enumerate(spans)]
        streams = [self.streams[r][a:b].clone() for r, (a, b) in enumerate(spans)]
        for r in range(len(ids)):
            ids[r] = ids[r][: len(ids[r]) - wrong] + [0] * wrong
            streams[r][len(streams[r]) - wrong :] = 9.0
        lens = torch.tensor(counts)
        batch = self._batch(
            mode,
            spans,
            input_ids=torch.tensor([i for part in ids for i in part]),
            seq_lens=torch.tensor([b for _, b in spans]),
            spec_info=EagleDraftExtendInput(hidden_states=torch.cat(streams).flatten(1)),
            extend_num_tokens=sum(counts),
            extend_seq_lens=lens.int(),
            extend_seq_lens_cpu=counts,
            extend_prefix_lens=torch.tensor(self.done, dtype=torch.int32),
            extend_prefix_lens_cpu=list(self.done),
            extend_start_loc=(lens.cumsum(0) - lens).int(),
        )
        logits, own = self._forward(batch)
        self.done = [b - wrong for _, b in spans]
        whole = list(own.view(len(own), -1, streams[0].shape[-1]).split(counts))
        return [list(logits.split(1 if len(logits) == len(counts) else counts)), whole]

    def chain(self, first: list[Tensor], streams: list[Tensor], steps: int) -> list[list[Tensor]]:
        """Logits [steps][request] of a chain whose first guess is the best of `first`.

        streams: [n, hidden] of the last row of each request.
        """
        logits, hidden = torch.stack(first), torch.stack(streams).flatten(1)
        found = [list(logits)]
        backend = SlotChainBackend(Dsv4AttnBackend, self.world.runner, steps)
        spans = [(d, d + 1) for d in self.done]
        batch = self._batch(
            ForwardMode.DECODE,
            spans,
            input_ids=logits.argmax(-1),
            seq_lens=torch.tensor(self.done),
            spec_info=EagleDraftInput(hidden_states=hidden),
        )
        backend.init_forward_metadata(batch)
        batch.mark_forward_metadata_ready()
        for step, own in enumerate(backend.attn_backends):
            at = [d + step for d in self.done]
            batch.input_ids, batch.spec_info.hidden_states = logits.argmax(-1), hidden
            batch.out_cache_loc = torch.stack([s[i] for s, i in zip(self.slots, at, strict=True)])
            batch.positions = torch.tensor(at)
            with forward_context(ForwardContext(attn_backend=own), forward_batch=batch):
                logits, hidden = self._forward(batch)
            found.append(list(logits))
        return found

    def _batch(self, mode: ForwardMode, spans: list[tuple[int, int]], **more: Any) -> ForwardBatch:
        return self.world._batch(
            mode,
            self.rows,
            positions=torch.cat([torch.arange(a, b) for a, b in spans]),
            out_cache_loc=torch.cat([s[a:b] for s, (a, b) in zip(self.slots, spans, strict=True)]),
            **more,
        )

    def _forward(self, batch: ForwardBatch) -> list[Tensor]:
        with torch.inference_mode():
            return self.world._forward(batch)


def worst_difference(world: ModelWorld, naive: NaiveModule, seed: int) -> float:
    """Over prompts in two chunks, and rounds of a chain and of rows partly rejected."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    n, hidden = naive.raw["hc_mult"], naive.raw["hidden_size"]
    room = ROUNDS * WIDEST
    following = [rng.choices(range(256), k=length + room) for length in LENGTHS]
    streams = [torch.randn(len(ids), n, hidden, generator=generator) for ids in following]
    expected = [naive(ids, s) for ids, s in zip(following, streams, strict=True)]
    play = Requests(world, following, streams)
    play.extend([max(length // 2, 1) for length in LENGTHS], ForwardMode.EXTEND)
    left = [length - done for length, done in zip(LENGTHS, play.done, strict=True)]
    logits, own = play.extend(left, ForwardMode.EXTEND)
    worst = 0.0
    for steps in (1, 2, 4)[:ROUNDS]:
        last = [part[-1] for part in logits]
        ends = [part[len(part) - 1] for part in own]
        found = play.chain(last, ends, steps)
        for r, done in enumerate(play.done):
            _, wanted = chain(naive, following[r][:done], streams[r][:done], steps)
            worst = max(
                worst, *(float((found[i][r] - wanted[i]).abs().max()) for i in range(steps))
            )
        rejected = rng.randint(0, steps)
        before = list(play.done)
        mode = ForwardMode.DRAFT_EXTEND_V2
        logits, own = play.extend([steps + 1] * len(LENGTHS), mode, wrong=rejected)
        kept = steps + 1 - rejected
        logits, own = ([part[:kept] for part in parts] for parts in (logits, own))
        for r, at in enumerate(before):
            for mine, theirs in zip((logits[r], own[r]), expected[r], strict=True):
                worst = max(worst, float((mine - theirs[at : at + kept]).abs().max()))
    return worst


def checkpoint(path: Path, **config: Any) -> tuple[Path, NaiveModule, dict[str, Tensor]]:
    """A checkpoint as the module sees it: the target's tensors are passed over."""
    target = write(path / "target", mixing=1.0, layers=2, with_mtp=True, **config)
    tensors, file = load_file(target / "model.safetensors"), target / "config.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps(raw | {"architectures": [OFFICIAL_MODULE]}))
    return target, NaiveModule(tensors, raw), tensors


def share(world: ModelWorld, tensors: dict[str, Tensor]) -> None:
    embed, head = (nn.Parameter(tensors[f"{name}.weight"], False) for name in ("embed", "head"))
    world.model.set_embed_and_head(embed, head)


@pytest.mark.parametrize("number", range(len(CONFIGURATIONS)))
def test_guesses_equal_a_naive_module(tmp_path: Path, number: int) -> None:
    target, naive, tensors = checkpoint(tmp_path, seed=number, **CONFIGURATIONS[number])
    with model_world(target, "float32") as world:
        share(world, tensors)
        assert worst_difference(world, naive, seed=number) < TOLERANCE


def test_in_bfloat16_the_shared_head_is_used(tmp_path: Path) -> None:
    """Heads are packed when a model is loaded, before a draft gets its target's."""
    target, naive, tensors = checkpoint(tmp_path, **CONFIGURATIONS[0])
    generator = torch.Generator().manual_seed(3)
    ids = random.Random(3).choices(range(256), k=20)
    streams = torch.randn(20, naive.raw["hc_mult"], naive.raw["hidden_size"], generator=generator)
    with model_world(target, "bfloat16") as world:
        share(world, {name: value.bfloat16() for name, value in tensors.items()})
        play = Requests(world, [ids], [streams.bfloat16()])
        logits, _ = play.extend([20], ForwardMode.EXTEND)
    wanted = naive(ids, streams)[0][-1]
    assert float((logits[0] - wanted).abs().max()) < 0.1 * float(wanted.abs().max())


def _swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    enter = deepseek_v4_nextn.Module.enter
    monkeypatch.setattr(
        deepseek_v4_nextn.Module, "enter", lambda self, e, s: enter(self, e, s.flip(1))
    )


def _collapsed(monkeypatch: pytest.MonkeyPatch) -> None:
    enter = deepseek_v4_nextn.Module.enter
    monkeypatch.setattr(
        deepseek_v4_nextn.Module,
        "enter",
        lambda self, e, s: enter(self, e, s.mean(1, keepdim=True).expand_as(s).contiguous()),
    )


def _every_step_like_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_ext.srt.attention import slot_backend

    chain_spans = slot_backend.chain_spans
    monkeypatch.setattr(slot_backend, "chain_spans", lambda batch, step: chain_spans(batch, 0))


@pytest.mark.parametrize("fault", [_swapped, _collapsed, _every_step_like_the_first])
def test_planted_faults_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    target, naive, tensors = checkpoint(tmp_path, **CONFIGURATIONS[1])
    fault(monkeypatch)
    with model_world(target, "float32") as world:
        share(world, tensors)
        assert worst_difference(world, naive, seed=5) > 100 * TOLERANCE
