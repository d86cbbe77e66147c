"""Our DeepSeek-V4 against HF's, logit by logit, over configurations drawn at random.

The model rank is real (loader, token pool, attention backend, MoE); only the scheduler is played:
prompts in one piece and in chunks, decode steps, verify rows that are partly rejected.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_ext.core import compress as core_compress
from sglang_ext.core import indexer_v4
from sglang_ext.core.compress import CSA
from sglang_ext.core.indexer_v32 import hadamard
from sglang_ext.core.rope import rotate_half_split, rotate_trailing_pairs
from sglang_ext.srt.attention import dsv4, row_map
from sglang_ext.srt.cache.dsv4_pool import bytes_per_token
from sglang_ext.srt.models import deepseek_v4, deepseek_v4_attention
from sglang_ext.tiny_model.deepseek_v4 import write
from tests.adapters.model_world import ModelWorld, model_world
from tests.oracle.v4 import hf_logits, hf_logits_float64, load_hf
from tests.oracle.v32 import Sequences

pytestmark = pytest.mark.oracle

# 40 of them are held to float32; CSA layers with head_dim 2 are judged by float64.
CONFIGURATIONS = 44
TAIL = 12
TOLERANCE = 1e-4
YARN = {
    "type": "yarn", "factor": 16, "original_max_position_embeddings": 64,
    "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
MIXES = ((0, 4, 128), (4,), (128, 128, 4), (0, 0), (4, 128, 4, 0), (128,))


def drawn(number: int) -> dict[str, Any]:
    """Fields of configuration `number`; sizes odd or prime where they may be."""
    rng = random.Random(4000 + number)
    ratios = MIXES[number % len(MIXES)]
    groups = rng.choice((1, 2, 3))
    rope = rng.choice((2, 4, 8))
    experts = rng.choice((3, 5, 8))
    return {
        "layers": len(ratios),
        "compress_ratios": list(ratios),
        "num_hash_layers": rng.randint(0, len(ratios)),
        "hidden_size": rng.choice((48, 64)),
        "num_attention_heads": groups * rng.choice((1, 2)),
        "o_groups": groups,
        "o_lora_rank": rng.choice((5, 16)),
        "q_lora_rank": rng.choice((7, 24)),
        "head_dim": rope * rng.choice((1, 2, 4)),
        "qk_rope_head_dim": rope,
        "n_routed_experts": experts,
        "num_experts_per_tok": rng.randint(1, min(3, experts)),
        "moe_intermediate_size": 32,
        "swiglu_limit": rng.choice((0.5, 10.0)),
        "hc_mult": rng.choice((2, 4)),
        "hc_sinkhorn_iters": rng.choice((1, 20)),
        # One index head leaves many scores exactly zero, so the tie rule decides often.
        "index_n_heads": rng.choice((1, 4, 16)),
        "index_head_dim": rope * rng.choice((1, 2)),
        "index_topk": (1, 3, 8, 200)[number % 4],
        "sliding_window": (1, 7, 16, 128)[number // 4 % 4],
        "rope_scaling": YARN if number % 3 == 0 else None,
    }


TWO_WIDE = tuple(
    number
    for number in range(CONFIGURATIONS)
    if drawn(number)["head_dim"] == 2 and CSA in drawn(number)["compress_ratios"]
)


def prompts(number: int) -> list[list[int]]:
    """Lengths around the ends of CSA and HCA blocks; one up to 600."""
    rng = random.Random(number)
    # The pool holds 1,024 tokens.
    last = rng.randint(300, 600 - TAIL) if number % 4 == 0 else rng.randint(255, 259)
    lengths = (*rng.sample(range(1, 10), 3), rng.randint(127, 131), last)
    return [rng.choices(range(256), k=n + TAIL) for n in lengths]


def check_piecewise(
    world: ModelWorld,
    hf: Any,
    sequences: list[list[int]],
    seed: int,
    *,
    same_tokens: bool = True,
) -> float:
    """Largest difference to HF over a random way of feeding `sequences`.

    hf: the model, or its logits for each sequence.
    """
    rng, worst = random.Random(seed), 0.0
    expected = hf if isinstance(hf, list) else [hf_logits(hf, s) for s in sequences]
    play = Sequences(world, sequences)

    def compare(request: int, position: int, logits: torch.Tensor) -> None:
        nonlocal worst
        wanted = expected[request][position : position + len(logits)]
        worst = max(worst, float((logits - wanted).abs().max()))
        if same_tokens:
            assert torch.equal(logits.argmax(-1), wanted.argmax(-1)), (request, position)

    while any(d < len(s) - TAIL for d, s in zip(play.done, sequences, strict=True)):
        left = {r: len(s) - TAIL - play.done[r] for r, s in enumerate(sequences)}
        counts = {r: rng.choice((n, rng.randint(1, n))) for r, n in left.items() if n > 0}
        for request, logits in play.extend(counts).items():
            compare(request, play.done[request] - 1, logits[None])
    for _ in range(2):
        for request, logits in play.decode(range(len(sequences))).items():
            compare(request, play.done[request] - 1, logits[None])
    while min(len(s) - d for d, s in zip(play.done, sequences, strict=True)):
        left = {r: len(s) - play.done[r] for r, s in enumerate(sequences)}
        counts = {r: rng.randint(1, min(n, 6)) for r, n in left.items() if n}
        before = list(play.done)
        kept = {r: rng.randint(1, n) for r, n in counts.items()}
        for request, logits in play.verify(counts, commit=kept).items():
            compare(request, before[request], logits)
    return worst


@pytest.mark.parametrize("number", sorted(set(range(CONFIGURATIONS)) - set(TWO_WIDE)))
def test_logits_equal_transformers(tmp_path: Path, number: int) -> None:
    path = write(tmp_path / "target", seed=number, mixing=1.0, **drawn(number))
    hf = load_hf(path)
    with model_world(path, "float32") as world:
        assert check_piecewise(world, hf, prompts(number), seed=number) < TOLERANCE


@pytest.mark.parametrize("number", TWO_WIDE)
def test_norms_over_two_numbers_against_float64(tmp_path: Path, number: int) -> None:
    """Where float32 itself promises less than the tolerance, float64 is the judge.

    These are beside the 40 that are held to float32's.

    head_dim is 2 in these: a norm over two numbers that are both small divides by little, and
    transformers' own float32 logits (around 30) are up to 1.5e-4 from its float64 ones.
    """
    path = write(tmp_path / "target", seed=number, mixing=1.0, **drawn(number))
    hf, sequences = load_hf(path), prompts(number)
    low = [hf_logits(hf, s) for s in sequences]
    exact = [hf_logits_float64(hf, s) for s in sequences]
    allowed = max(float((a - b).abs().max()) for a, b in zip(low, exact, strict=True))
    with model_world(path, "float32") as world:
        worst = check_piecewise(world, exact, sequences, seed=number)
    assert worst < max(TOLERANCE, 2 * allowed)


def test_three_hundred_decode_steps_equal_one_prefill(tmp_path: Path) -> None:
    path = write(tmp_path / "target", seed=1, mixing=1.0, index_topk=16)
    sequence = random.Random(5).choices(range(256), k=310)
    expected = hf_logits(load_hf(path), sequence)
    with model_world(path, "float32") as world:
        pool = world.runner.token_to_kv_pool
        held = sum(buffer.nbytes for rows in pool.rows for buffer in rows.values())
        assert held == (pool.size + pool.page_size) * bytes_per_token(pool.facts, torch.float32, 1)
        play = Sequences(world, [sequence])
        play.extend({0: 10})
        for position in range(10, 310):
            found = play.decode([0])[0]
            assert float((found - expected[position]).abs().max()) < TOLERANCE, position
            assert found.argmax() == expected[position].argmax(), position


def _late_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dsv4, "visible_entries", lambda p, ratio: p // ratio)


def _early_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dsv4, "visible_entries", lambda p, ratio: (p + 2) // ratio)


def _no_block_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(last: torch.Tensor, ratio: int) -> torch.Tensor:
        at = core_compress.block_positions(last, ratio)
        at[:, :-ratio] = -1
        return at

    monkeypatch.setattr(row_map, "block_positions", alone)


def _entry_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    real = dsv4._LayerCall._compress

    def only_where_empty(self: Any, mapped: Any, new: Any, source: str, target: str) -> None:
        before = self.rows[target].clone()
        real(self, mapped, new, source, target)
        made = before.abs().sum(dim=-1) > 0
        self.rows[target][made] = before[made]

    monkeypatch.setattr(dsv4._LayerCall, "_compress", only_where_empty)


def _half_split(monkeypatch: pytest.MonkeyPatch) -> None:
    def rotate(x: Any, cos: Any, sin: Any, *, inverse: bool = False) -> torch.Tensor:
        width = 2 * cos.shape[-1]
        turned = rotate_half_split(x[..., -width:], cos, -sin if inverse else sin)
        return torch.cat((x[..., :-width], turned), dim=-1)

    monkeypatch.setattr(deepseek_v4_attention, "rotate_trailing_pairs", rotate)


def _indexer_half_split(monkeypatch: pytest.MonkeyPatch) -> None:
    def rotate(x: Any, cos: Any, sin: Any) -> torch.Tensor:
        width = 2 * cos.shape[-1]
        turned = rotate_half_split(x[..., -width:], cos, sin)
        return torch.cat((x[..., :-width], turned), dim=-1)

    monkeypatch.setattr(indexer_v4, "rotate_trailing_pairs", rotate)


def _indexer_rotates_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def rotate(x: Any, cos: Any, sin: Any) -> torch.Tensor:
        return rotate_trailing_pairs(x.flip(-1), cos, sin).flip(-1)

    monkeypatch.setattr(indexer_v4, "rotate_trailing_pairs", rotate)


def _hadamard_on_queries_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    real = deepseek_v4_attention.index_query_v4
    monkeypatch.setattr(deepseek_v4_attention, "index_query_v4", lambda *a: hadamard(real(*a)))


def _streams_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    real = deepseek_v4.hc_post
    monkeypatch.setattr(
        deepseek_v4, "hc_post", lambda y, s, post, comb: real(y, s, post, comb.transpose(1, 2))
    )


@pytest.mark.parametrize(
    "fault",
    [
        _late_by_one,
        _early_by_one,
        _no_block_before,
        _entry_kept,
        _half_split,
        _indexer_half_split,
        _indexer_rotates_first,
        _hadamard_on_queries_alone,
        _streams_swapped,
    ],
)
def test_planted_faults_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    path = write(tmp_path / "target", seed=2, mixing=1.0, layers=4)
    hf, sequences = load_hf(path), prompts(1)
    with model_world(path, "float32") as world:
        assert check_piecewise(world, hf, sequences, seed=1) < TOLERANCE
        fault(monkeypatch)
        worst = check_piecewise(world, hf, sequences, seed=1, same_tokens=False)
        assert worst > 10 * TOLERANCE
