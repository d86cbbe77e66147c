"""Tiny drafts for SGLang's own speculative algorithms, made to guess often but not always.

The tiny targets lean on their last token (see `tiny`). Each draft here passes the embedding of
that token on to its head and adds some noise of its own, so that accepted lengths vary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import tiny

NOISE = 0.3
EAGLE3_DRAFT_VOCAB = 200

_DRAFT_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": tiny.HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "vocab_size": tiny.VOCAB,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": tiny.EOS,
}


def _save(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _noise(*shape: int) -> Tensor:
    return NOISE * torch.randn(shape) / shape[-1] ** 0.5


def _mlp(prefix: str) -> dict[str, Tensor]:
    hidden, inner = tiny.HIDDEN, 96
    return {
        f"{prefix}.mlp.gate_proj.weight": _noise(inner, hidden),
        f"{prefix}.mlp.up_proj.weight": _noise(inner, hidden),
        f"{prefix}.mlp.down_proj.weight": _noise(hidden, inner),
        f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden),
    }


def make_eagle(path: Path, target: Path) -> Path:
    """EAGLE: one layer over fc(embedding, hidden state); embedding and head are the target's."""
    torch.manual_seed(21)
    hidden = tiny.HIDDEN
    weights = load_file(target / "model.safetensors")
    norm = weights["model.norm.weight"]
    tensors = {
        "embed_tokens.weight": weights["model.embed_tokens.weight"],
        "fc.weight": torch.cat([torch.diag(norm), _noise(hidden, hidden)], dim=1),
        "fc.bias": torch.zeros(hidden),
        **_mlp("layers.0"),
    }
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        tensors[f"layers.0.self_attn.{name}.weight"] = _noise(hidden, hidden)
    config = _DRAFT_CONFIG | {"architectures": ["LlamaForCausalLMEagle"]}
    return _save(path, config, tensors)


def make_eagle3(path: Path, target: Path) -> Path:
    """EAGLE-3: three captured layers, and a head over a part of the vocabulary."""
    torch.manual_seed(22)
    hidden = tiny.HIDDEN
    weights = load_file(target / "model.safetensors")
    own, other = torch.eye(hidden), torch.zeros(hidden, hidden)
    reads_embedding = torch.cat([own, other], dim=1)
    kept = torch.arange(EAGLE3_DRAFT_VOCAB) * tiny.VOCAB // EAGLE3_DRAFT_VOCAB
    in_draft = torch.zeros(tiny.VOCAB, dtype=torch.bool)
    in_draft[kept] = True
    tensors = {
        "fc.weight": _noise(hidden, 3 * hidden),
        # Equal tokens attend to each other, so that the value read is the token's own embedding.
        "midlayer.self_attn.q_proj.weight": 4 * reads_embedding,
        "midlayer.self_attn.k_proj.weight": 4 * reads_embedding,
        "midlayer.self_attn.v_proj.weight": reads_embedding,
        "midlayer.self_attn.o_proj.weight": 4 * own,
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        **_mlp("midlayer"),
        "norm.weight": weights["model.norm.weight"],
        "lm_head.weight": weights["lm_head.weight"][kept],
        "d2t": kept - torch.arange(EAGLE3_DRAFT_VOCAB),
        "t2d": in_draft,
    }
    config = _DRAFT_CONFIG | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": EAGLE3_DRAFT_VOCAB,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }
    return _save(path, config, tensors)


def make_nextn_target(path: Path) -> Path:
    """A GLM-4.5 style mixture of experts that carries its own next-token layer."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    torch.manual_seed(23)
    config = Glm4MoeConfig(
        vocab_size=tiny.VOCAB,
        hidden_size=tiny.HIDDEN,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        use_qk_norm=True,
        attention_bias=True,
        max_position_embeddings=2048,
        eos_token_id=tiny.EOS,
        pad_token_id=tiny.PAD,
        tie_word_embeddings=False,
    )
    config.num_nextn_predict_layers = 1
    model = Glm4MoeForCausalLM(config).float()
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if "norm" in name:
                parameter.fill_(1.0)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.normal_(0.0, 1.0)
            elif parameter.dim() > 1:
                parameter.normal_(0.0, 0.4 / parameter.shape[-1] ** 0.5)
            else:
                parameter.normal_(0.0, 0.1)
    model.save_pretrained(path)
    tiny.save_tokenizer(path)
    weights = load_file(path / "model.safetensors")
    weights.update(_nextn_layer(weights))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _nextn_layer(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The extra layer behind the last: a copy of the sparse layer and its own projections."""
    hidden = tiny.HIDDEN
    source, extra = "model.layers.1.", "model.layers.2."
    layer = {
        extra + name.removeprefix(source): tensor.clone()
        for name, tensor in weights.items()
        if name.startswith(source)
    }
    return layer | {
        extra + "enorm.weight": torch.ones(hidden),
        extra + "hnorm.weight": torch.ones(hidden),
        extra + "eh_proj.weight": torch.cat([torch.eye(hidden), _noise(hidden, hidden)], dim=1),
        extra + "shared_head.norm.weight": torch.ones(hidden),
        extra + "shared_head.head.weight": weights["lm_head.weight"].clone(),
        extra + "embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
    }


def make_standalone(path: Path) -> Path:
    """The tiny Llama with smaller layers: the same random numbers, another scale."""
    return tiny.make_target(path, "llama", mixing=0.2)
