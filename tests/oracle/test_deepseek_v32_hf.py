"""Our DeepSeek-V3.2 against HF's, logit by logit, over configurations drawn at random.

The model rank is real (loader, token pool, attention backend, MoE); only the scheduler is played:
prompts in one piece and in chunks, decode steps, verify rows that are partly rejected.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_ext.srt.cache.dsa_pool import bytes_per_token
from sglang_ext.tiny_model.deepseek_v32 import write
from tests.adapters.model_world import ModelWorld, model_world
from tests.oracle.v32 import Sequences, hf_logits, load_hf
from tests.tiny import save_tokenizer

pytestmark = pytest.mark.oracle

CONFIGURATIONS = 40
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9)
TOLERANCE = 1e-4
YARN = {
    "type": "yarn",
    "factor": 32,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def drawn(number: int) -> dict[str, Any]:
    """Fields of configuration `number`; every size odd or prime where it may be."""
    rng = random.Random(1000 + number)
    groups = rng.choice((1, 2, 4))
    per_group = rng.choice((2, 3, 5))
    chosen = rng.randint(1, groups)
    rope = rng.choice((2, 4, 8, 16))
    return {
        "num_hidden_layers": rng.randint(1, 4),
        "first_k_dense_replace": rng.randint(0, 2),
        "hidden_size": rng.choice((48, 64)),
        "num_attention_heads": rng.choice((1, 3, 4)),
        "q_lora_rank": rng.choice((7, 24)),
        "kv_lora_rank": rng.choice((5, 32)),
        "qk_nope_head_dim": rng.choice((1, 11, 16)),
        "qk_rope_head_dim": rope,
        "v_head_dim": rng.choice((1, 13, 16)),
        "n_routed_experts": groups * per_group,
        "n_group": groups,
        "topk_group": chosen,
        "num_experts_per_tok": rng.randint(1, min(3, chosen * per_group)),
        "n_shared_experts": rng.choice((1, 2)),
        "norm_topk_prob": rng.random() < 0.7,
        # One index head leaves many scores exactly zero, so the tie rule decides often.
        "index_n_heads": (1, 2, 8, 16)[rng.randrange(3) if number % 4 else 3],
        "index_head_dim": rng.choice((rope, rope + 3, 16 + rope)),
        "index_topk": (1, 2, 3, 5, 7, 16, 64, 512)[number % 8],
        "rope_scaling": YARN if number % 3 == 0 else None,
        "num_nextn_predict_layers": number % 2,
    }


def prompts(number: int, top_k: int) -> list[list[int]]:
    """Lengths 1..9, around top_k, around 128 and 256, and up to 300 (a fourth of them: 588).

    Over the configurations each of 127..131 and of 255..259 comes up.
    """
    rng = random.Random(number)
    around = [n for n in (top_k - 1, top_k, top_k + 1, top_k + 2) if 0 < n <= 300]
    long = rng.randint(200, 300) if number % 4 else rng.randint(300, 588)
    lengths = [*LENGTHS, *around, 127 + number % 5, 255 + number // 5 % 5, long]
    return [rng.choices(range(256), k=n + 12) for n in lengths]


def check_piecewise(world: ModelWorld, hf: Any, sequences: list[list[int]], seed: int) -> float:
    """Largest difference to HF over a random way of feeding `sequences`."""
    rng, worst = random.Random(seed), 0.0
    expected = [hf_logits(hf, s) for s in sequences]
    play = Sequences(world, sequences)

    def compare(request: int, position: int, logits: torch.Tensor) -> None:
        nonlocal worst
        wanted = expected[request][position : position + len(logits)]
        worst = max(worst, float((logits - wanted).abs().max()))
        assert torch.equal(logits.argmax(-1), wanted.argmax(-1)), (request, position)

    while any(d < len(s) - 12 for d, s in zip(play.done, sequences, strict=True)):
        left = {r: len(s) - 12 - play.done[r] for r, s in enumerate(sequences)}
        counts = {r: rng.choice((n, rng.randint(1, n))) for r, n in left.items() if n > 0}
        for request, logits in play.extend(counts).items():
            compare(request, play.done[request] - 1, logits[None])
    everyone = list(range(len(sequences)))
    for _ in range(2):
        for request, logits in play.decode(everyone).items():
            compare(request, play.done[request] - 1, logits[None])
    while min(len(s) - d for d, s in zip(play.done, sequences, strict=True)):
        left = {r: len(s) - play.done[r] for r, s in enumerate(sequences)}
        counts = {r: rng.randint(1, min(n, 6)) for r, n in left.items() if n}
        before = list(play.done)
        kept = {r: rng.randint(1, n) for r, n in counts.items()}
        for request, logits in play.verify(counts, commit=kept).items():
            compare(request, before[request], logits)
    return worst


@pytest.mark.parametrize("number", range(CONFIGURATIONS))
def test_logits_and_greedy_tokens_equal_transformers(tmp_path: Path, number: int) -> None:
    fields = drawn(number)
    path = write(tmp_path / "target", seed=number, mixing=1.0, **fields)
    save_tokenizer(path)
    hf = load_hf(path)
    with model_world(path, "float32") as world:
        sequences = prompts(number, fields["index_topk"])
        # The pool holds 8 requests and 1,024 tokens: the three long prompts go together.
        for batch in (sequences[:8], sequences[8:-3], sequences[-3:]):
            assert check_piecewise(world, hf, batch, seed=number) < TOLERANCE


def test_three_hundred_decode_steps_equal_one_prefill(tmp_path: Path) -> None:
    path = write(tmp_path / "target", seed=1, mixing=1.0, index_topk=16, index_n_heads=16)
    save_tokenizer(path)
    sequence = random.Random(5).choices(range(256), k=310)
    expected = hf_logits(load_hf(path), sequence)
    with model_world(path, "float32") as world:
        pool, facts = world.runner.token_to_kv_pool, world.model.facts
        held = sum(buffer.nbytes for buffer in (*pool.k_buffer, *pool.v_buffer))
        per_token = bytes_per_token(facts, facts.num_hidden_layers, torch.float32)
        assert held == (pool.size + pool.page_size) * per_token
        play = Sequences(world, [sequence])
        play.extend({0: 10})
        for position in range(10, 310):
            found = play.decode([0])[0]
            assert float((found - expected[position]).abs().max()) < TOLERANCE, position
            assert found.argmax() == expected[position].argmax(), position


def test_rows_do_not_depend_on_their_company(tmp_path: Path) -> None:
    """A request alone and among others of other lengths gets the same logits."""
    path = write(tmp_path / "target", seed=3, mixing=1.0, index_topk=7)
    save_tokenizer(path)
    rng = random.Random(0)
    sequences = [rng.choices(range(256), k=n) for n in (1, 3, 9, 40, 120)]
    with model_world(path, "float32") as world:
        play = Sequences(world, sequences)
        together = play.extend({r: len(s) for r, s in enumerate(sequences)})
        for request, sequence in enumerate(sequences):
            alone = Sequences(world, [sequence]).extend({0: len(sequence)})[0]
            assert float((alone - together[request]).abs().max()) < TOLERANCE
