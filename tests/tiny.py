"""Tiny checkpoints that tests make for themselves: targets, a byte tokenizer, drafts.

The targets lean on the last token (small attention and MLP weights), so that a Markov head built
from the target's own embedding and head guesses often, but not always: acceptance of every length
occurs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sglang_ext.tiny_model.tokenizer import EOS, MASK, PAD, save_tokenizer

VOCAB = 264
HIDDEN = 64
LAYERS = 4
KINDS = ("llama", "qwen2", "qwen3", "qwen3_moe")

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
}


def _config(kind: str, **changes: Any) -> Any:
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    base = {**_COMMON, **changes}
    if kind == "llama":
        return LlamaConfig(**base)
    if kind == "qwen2":
        base.pop("head_dim")
        return Qwen2Config(**base)
    if kind == "qwen3":
        return Qwen3Config(**base)
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    return Qwen3MoeConfig(**base, **moe, norm_topk_prob=True, decoder_sparse_step=1)


def make_target(
    path: Path, kind: str = "llama", *, seed: int = 0, mixing: float = 0.5, **changes: Any
) -> Path:
    """A random fp32 target of an HF architecture, with its tokenizer.

    mixing: size of what attention and MLP add; 0 makes the next token a function of the last.
    """
    from transformers import AutoModelForCausalLM

    if kind == "deepseek_v32":
        from sglang_ext.tiny_model import deepseek_v32

        deepseek_v32.write(path, seed=seed, mixing=mixing, **changes)
        save_tokenizer(path, VOCAB)
        return path
    if kind == "deepseek_v4":
        from sglang_ext.tiny_model import deepseek_v4

        # As many groups as the widest layout has ranks: a draft may be split over all of them.
        options = {"layers": LAYERS, "with_dspark": True, "o_groups": 4, **changes}
        return deepseek_v4.write(path, seed=seed, mixing=mixing, **options)
    torch.manual_seed(seed)
    config = _config(kind, **changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if "norm" in name:
                parameter.fill_(1.0).add_(0.1 * torch.randn_like(parameter))
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.normal_(0.0, 1.0)
            elif parameter.dim() > 1:
                parameter.normal_(0.0, mixing / parameter.shape[-1] ** 0.5)
            else:
                parameter.normal_(0.0, 0.1)
    model.save_pretrained(path)
    save_tokenizer(path, VOCAB)
    return path


def target_weights(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


def draft_config(
    algorithm: str,
    *,
    gamma: int = 4,
    layers: int = 2,
    ids: tuple[int, ...] = (0, 1, 2),
    **more: Any,
) -> dict[str, Any]:
    """config.json of a draft for the tiny targets."""
    base: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": 80,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "vocab_size": VOCAB,
        "num_target_layers": LAYERS,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
    }
    if algorithm == "DSPARK":
        base |= {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": gamma,
            "mask_token_id": MASK,
            "target_layer_ids": list(ids),
            "markov_rank": HIDDEN,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
    else:
        base |= {
            "architectures": ["DFlashDraftModel"],
            "block_size": gamma + 1,
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(ids)},
        }
    return base | more


def make_draft(
    path: Path,
    algorithm: str,
    target: Path,
    *,
    seed: int = 1,
    base_scale: float = 0.05,
    **more: Any,
) -> Path:
    """A draft whose Markov head copies the target's last-token law and whose block adds noise.

    base_scale: size of the backbone's own say (its final norm weight).
    """
    from sglang_ext.core.spec.draft_config import TargetFacts, parse
    from sglang_ext.core.spec.draft_tensors import padded_tensors, required_tensors

    config = draft_config(algorithm, **more)
    facts = TargetFacts(num_hidden_layers=LAYERS, hidden_size=HIDDEN, vocab_size=VOCAB)
    parsed = parse(config, algorithm=algorithm, target=facts)
    torch.manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in required_tensors(parsed).items():
        if name.endswith("norm.weight") or "layernorm" in name:
            tensors[name] = torch.ones(shape)
        elif name == "d2t":
            tensors[name] = _spread_ids(parsed.draft_vocab_size, parsed.vocab_size)
        else:
            tensors[name] = torch.randn(shape) / max(shape[-1], 1) ** 0.5
    tensors["norm.weight"] = torch.full((HIDDEN,), base_scale)
    if parsed.markov_rank == HIDDEN:
        _copy_last_token_law(tensors, target_weights(target))
        _let_the_law_through(tensors)
    # Padding that is read spoils everything.
    for name in padded_tensors(parsed):
        kept = tensors[name][: parsed.vocab_size]
        padding = parsed.stored_vocab_size - len(kept)
        tensors[name] = torch.cat((kept, torch.full((padding, kept.shape[1]), torch.nan)))
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _let_the_law_through(tensors: dict[str, Tensor]) -> None:
    """Open the gate of a gated head; let an rnn head show its token's own row."""
    if "markov_head.gate_proj.bias" in tensors:
        tensors["markov_head.gate_proj.weight"] *= 0.5
        tensors["markov_head.gate_proj.bias"] = torch.full((HIDDEN,), 2.0)
    if "markov_head.joint_proj.bias" in tensors:
        weight = tensors["markov_head.joint_proj.weight"]
        weight[2 * HIDDEN :] *= 0.2
        weight[2 * HIDDEN :, HIDDEN : 2 * HIDDEN] += torch.eye(HIDDEN)


def _spread_ids(draft_vocab: int, vocab: int) -> Tensor:
    """EAGLE-3's d2t: target id minus draft id, for evenly spread targets."""
    draft = torch.arange(draft_vocab)
    return draft * vocab // draft_vocab - draft


def _copy_last_token_law(tensors: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    embed = weights["model.embed_tokens.weight"]
    normed = embed / embed.pow(2).mean(dim=-1, keepdim=True).sqrt()
    tensors["markov_head.markov_w1.weight"] = normed * weights["model.norm.weight"]
    head = weights.get("lm_head.weight", embed)
    if "d2t" in tensors:
        d2t = tensors["d2t"]
        head = head[torch.arange(len(d2t)) + d2t]
    tensors["markov_head.markov_w2.weight"] = head.contiguous()
