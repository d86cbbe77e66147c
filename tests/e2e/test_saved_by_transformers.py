"""Checkpoints that transformers itself wrote, its fields and tensor names, behind a real server."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_ext.tiny_model.deepseek_v4 import _CHAT, _EOS
from sglang_ext.tiny_model.tokenizer import save_tokenizer
from tests.e2e.client import greedy
from tests.e2e.stand import Stand
from tests.e2e.workload import random_prompt
from tests.oracle import v4, v32
from tests.tiny import EOS, PAD

pytestmark = [pytest.mark.e2e, pytest.mark.oracle]

LENGTHS, STEPS = (1, 7, 130, 300), 24
SIZES = {
    "vocab_size": 264, "hidden_size": 64, "moe_intermediate_size": 32, "q_lora_rank": 24,
    "num_attention_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "index_n_heads": 16, "index_head_dim": 16, "index_topk": 8, "max_position_embeddings": 2048,
    "bos_token_id": None, "eos_token_id": EOS, "pad_token_id": PAD,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 128,
        "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip


def _v4() -> Any:
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    rope = {
        "main": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25},
        "compress": {
            "rope_theta": 160000.0,
            "partial_rotary_factor": 0.25,
            **YARN,
            "attention_factor": 1.0,
        },
    }
    config = DeepseekV4Config(
        **SIZES, num_hidden_layers=4, head_dim=32, partial_rotary_factor=0.25,
        o_groups=2, o_lora_rank=16, sliding_window=16,
        layer_types=["sliding_attention", "compressed_sparse_attention",
                     "heavily_compressed_attention", "compressed_sparse_attention"],
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"], rope_parameters=rope,
    )  # fmt: skip
    return DeepseekV4ForCausalLM(config)


def _v32() -> Any:
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    config = DeepseekV32Config(
        **SIZES, num_hidden_layers=3, intermediate_size=96, first_k_dense_replace=1,
        kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, n_group=2,
        topk_group=1,
        rope_parameters={"rope_theta": 10000.0, "mscale": 1.0, "mscale_all_dim": 1.0, **YARN},
    )  # fmt: skip
    return DeepseekV32ForCausalLM(config)


@torch.no_grad()
def _filled(model: Any) -> Any:
    """Values of a spread that decides tokens; what transformers starts with is nearly flat."""
    generator = torch.Generator().manual_seed(3)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        noise = torch.randn(tensor.shape, generator=generator)
        if "tid2eid" in name:
            # Different experts for a token.
            tensor.copy_((noise[:, :1] * 1000).long() + torch.arange(tensor.shape[1]) & 7)
        elif "norm.weight" in name or "layernorm.weight" in name:
            tensor.copy_(1 + 0.1 * noise)
        elif "inv_freq" in name:
            continue
        elif "embed" in name or "lm_head" in name or "position_bias" in name:
            tensor.copy_(noise)
        elif tensor.dim() > 1:
            tensor.copy_(0.7 * noise / tensor.shape[-1] ** 0.5)
        else:
            tensor.copy_(0.3 * noise)
    return model.float().eval()


@torch.no_grad()
def _generated(model: Any, prompt: list[int]) -> list[int]:
    out: Tensor = model.generate(
        torch.tensor([prompt]), max_new_tokens=STEPS, do_sample=False, pad_token_id=PAD
    )
    return out[0, len(prompt) :].tolist()


MODELS = {
    "v4": (_v4, v4.earliest_wins, "model.layers.0.attn.wkv.weight", "layer_types"),
    "v32": (_v32, v32.earliest_wins, "lm_head.weight", "rope_parameters"),
}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_generate(stand: Stand, tmp_path: Path, name: str) -> None:
    make, earliest_wins, tensor, field = MODELS[name]
    path, model = tmp_path / name, _filled(make())
    model.save_pretrained(path)
    save_tokenizer(path, SIZES["vocab_size"], eos=_EOS, chat=_CHAT)
    _is_as_transformers_writes(path, tensor, field)
    client = stand.server(stand.plain_spec(path)).client
    prompts = [random_prompt(n, 40 + n) for n in LENGTHS]
    replies = client.batch(prompts, greedy(STEPS))
    ties: AbstractContextManager[None] = earliest_wins()
    with ties:
        expected = [_generated(model, prompt) for prompt in prompts]
    assert [reply.ids for reply in replies] == expected
    assert len({tuple(ids) for ids in expected}) == len(expected)


def _is_as_transformers_writes(path: Path, tensor: str, field: str) -> None:
    """The test would show little on a file that carries the published names."""
    from safetensors import safe_open

    config = json.loads((path / "config.json").read_text())
    assert "transformers_version" in config
    assert field in config
    assert "compress_ratios" not in config
    assert "rope_scaling" not in config
    with safe_open(path / "model.safetensors", "pt") as file:
        assert tensor in set(file.keys())
