"""Writing a trained draft as a public-format checkpoint, and reading it back.

DeepSpec's dense formats (flat keys) for drafts whose anchor row predicts, z-lab's
(`dflash_config`) for the others. Embedding and head are the target's and not shipped; `d2t` maps a
reduced draft vocabulary to the target's, with EAGLE-3's key `draft_vocab_size`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sglang_ext.training.draft import Draft, DraftShape
from sglang_ext.training.target import Target

_DSPARK, _DFLASH, _ZLAB = "Qwen3DSparkModel", "Qwen3DFlashModel", "DFlashDraftModel"
_TRAINING_ONLY = ("feature_scale", "table_scale", "markov_head.")


def draft_config(shape: DraftShape, target_config: dict[str, Any]) -> dict[str, Any]:
    """The contents of config.json for a draft of `shape`."""
    common = {
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": target_config["max_position_embeddings"],
        "vocab_size": shape.vocab,
        "draft_vocab_size": shape.draft_vocab,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": target_config.get("bos_token_id"),
        "eos_token_id": target_config.get("eos_token_id"),
        "num_target_layers": target_config["num_hidden_layers"],
        "block_size": shape.block_size,
        "layer_types": ["full_attention"] * shape.layers,
    }
    inner = {
        "mask_token_id": shape.mask_token_id,
        "target_layer_ids": list(shape.target_layer_ids),
    }
    if not shape.anchor_predicts:
        return {"architectures": [_ZLAB], **common, "dflash_config": inner}
    if shape.algorithm == "DFLASH":
        return {"architectures": [_DFLASH], **common, **inner, "markov_rank": 0}
    return {
        "architectures": [_DSPARK],
        **common,
        **inner,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "markov_rank": shape.markov_rank,
        "markov_head_type": "vanilla",
    }


@torch.no_grad()
def checkpoint_tensors(draft: Draft) -> dict[str, torch.Tensor]:
    """The draft's tensors under their public names, training-only parts folded in; bf16."""
    tensors = {
        name: value
        for name, value in draft.state_dict().items()
        if not name.startswith(_TRAINING_ONLY)
    }
    tensors["fc.weight"] = tensors["fc.weight"] * draft.feature_scale
    tables = draft.markov_tables()
    if tables is not None:
        tensors["markov_head.markov_w1.weight"], tensors["markov_head.markov_w2.weight"] = tables
    return {
        name: (value if name == "d2t" else value.to(torch.bfloat16)).contiguous()
        for name, value in tensors.items()
    }


def export(draft: Draft, target_config: dict[str, Any], out: Path) -> None:
    """Write config.json and model.safetensors to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    config = json.dumps(draft_config(draft.shape, target_config), indent=2)
    (out / "config.json").write_text(config + "\n", encoding="utf-8")
    file = out / "model.safetensors"
    save_file(checkpoint_tensors(draft), file, metadata={"format": "pt"})
    file.chmod(0o644)


def read_shape(config: dict[str, Any]) -> DraftShape:
    """The shape that `draft_config` wrote.

    Raises:
        ValueError: the checkpoint is of neither architecture.
    """
    name = config["architectures"][0]
    if name not in (_DSPARK, _DFLASH, _ZLAB):
        raise ValueError(f"architectures: expected {_DSPARK}, {_DFLASH} or {_ZLAB}, found {name}")
    flat = {**config, **config.get("dflash_config", {})}
    return DraftShape(
        algorithm="DSPARK" if name == _DSPARK else "DFLASH",
        hidden=flat["hidden_size"],
        intermediate=flat["intermediate_size"],
        layers=flat["num_hidden_layers"],
        heads=flat["num_attention_heads"],
        kv_heads=flat["num_key_value_heads"],
        head_dim=flat["head_dim"],
        block_size=flat["block_size"],
        target_layer_ids=tuple(flat["target_layer_ids"]),
        mask_token_id=flat["mask_token_id"],
        vocab=flat["vocab_size"],
        draft_vocab=flat.get("draft_vocab_size", flat["vocab_size"]),
        markov_rank=flat.get("markov_rank", 0),
        rope_theta=flat["rope_theta"],
        norm_eps=flat["rms_norm_eps"],
        anchor_predicts=name != _ZLAB,
    )


@torch.no_grad()
def load_exported(path: Path, target: Target) -> Draft:
    """An exported draft over `target`, for evaluation or further training."""
    shape = read_shape(json.loads((path / "config.json").read_text(encoding="utf-8")))
    tensors = load_file(path / "model.safetensors")
    d2t = tensors.get("d2t", torch.zeros(shape.draft_vocab, dtype=torch.int64))
    head = target.head_weight[d2t + torch.arange(len(d2t))].contiguous()
    draft = Draft(
        shape, embedding=target.embedding, head=head, d2t=d2t, positions=target.shape.capacity
    )
    if draft.markov_head is not None:
        draft.markov_head.first.zero_()
        draft.markov_head.second.zero_()
    wanted = draft.state_dict()
    loaded = {name: value.to(wanted[name].dtype) for name, value in tensors.items()}
    draft.load_state_dict(loaded, strict=False)
    return draft
