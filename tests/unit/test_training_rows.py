"""The target over rows: both backends against HF, decode against prefill, slots kept apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_ext.training.rows import native_available
from sglang_ext.training.target import Target

transformers = pytest.importorskip("transformers")
BACKENDS = [
    False,
    pytest.param(
        True, marks=pytest.mark.skipif(not native_available(), reason="no AVX512-BF16 or g++")
    ),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 Llama with an odd number of kv groups."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=96,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        rope_theta=1000.0,
        initializer_range=0.08,
    )
    path = tmp_path_factory.mktemp("tiny")
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    return path


@pytest.mark.parametrize("native", BACKENDS)
def test_prefill_and_captured_layers_agree_with_hf(tiny: Path, native: bool) -> None:
    lengths = (37, 1, 17)
    ids = [torch.randint(97, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    target = Target(tiny, slots=5, capacity=48, native=native)
    slot = torch.tensor([3, 0, 4]).repeat_interleave(torch.tensor(lengths))
    position = torch.cat([torch.arange(n) for n in lengths])
    final, (first, last) = target.forward(torch.cat(ids), slot, position, capture=(0, 1))
    logits = target.head(final).float()
    model = transformers.LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    at = 0
    for text in ids:
        with torch.no_grad():
            expected = model(text[None], output_hidden_states=True)
        rows = slice(at, at + len(text))
        at += len(text)
        scale = expected.logits.abs().max()
        assert (logits[rows] - expected.logits[0]).abs().max() < 0.03 * scale
        for found, layer in ((first, 0), (last, 1)):
            want = expected.hidden_states[layer + 1][0]
            assert (found[rows].float() - want).abs().max() < 0.03 * want.abs().max()


@pytest.mark.parametrize("native", BACKENDS)
def test_decoding_row_by_row_equals_prefill(tiny: Path, native: bool) -> None:
    ids = torch.randint(97, (2, 35), generator=torch.Generator().manual_seed(1))
    target = Target(tiny, slots=3, capacity=48, native=native)
    slots = torch.tensor([2, 0])
    whole, _ = target.forward(
        ids.flatten(), slots.repeat_interleave(35), torch.arange(35).repeat(2)
    )
    again = Target(tiny, slots=3, capacity=48, native=native)
    steps = [
        again.forward(ids[:, p].contiguous(), slots, torch.full((2,), p))[0] for p in range(35)
    ]
    stepped = torch.stack(steps, dim=1).flatten(0, 1)
    assert (stepped.float() - whole.float()).norm() < 0.03 * whole.float().norm()


def test_argmax_takes_the_first_of_equals(tiny: Path) -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0], [-3.0, -3.0, -1.0]]).bfloat16()
    for native in (False, True) if native_available() else (False,):
        assert Target(tiny, slots=1, capacity=16, native=native).ops.argmax(logits).tolist() == [
            1, 0, 2,
        ]  # fmt: skip
