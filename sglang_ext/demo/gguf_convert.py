"""From a llama.cpp GGUF file to an ordinary Hugging Face Llama checkpoint.

Every tensor is dequantised and stored as bf16; the tokenizer and the chat template come from the
GGUF metadata. Only the `llama` architecture is read: it is what the built-in model is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONTROL_TOKEN = 3  # llama.cpp's token type for tokens that text never produces

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PER_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama model that the conversion needs."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    context: int
    rope_theta: float
    norm_eps: float


def hf_name(name: str) -> str:
    """Hugging Face's name of the GGUF tensor `name`.

    Raises:
        ValueError: the tensor is not one of a Llama model.
    """
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    prefix, _, rest = name.partition(".")
    layer, _, kind = rest.partition(".")
    if prefix != "blk" or kind not in _PER_LAYER:
        raise ValueError(
            f"GGUF tensor {name!r} is not part of a Llama model "
            f"(known per layer: {', '.join(sorted(_PER_LAYER))}); convert it with other means"
        )
    return f"model.layers.{layer}.{_PER_LAYER[kind]}"


def unpermute_rope(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's row order of q_proj and k_proj: `weight` [heads * head_dim, hidden].

    llama.cpp rotates neighbouring pairs (0,1), (2,3), ...; Hugging Face rotates (i, i + half).
    Inside each head the GGUF row 2 * i + j is therefore Hugging Face's row j * half + i.
    """
    rows, columns = weight.shape
    if rows % (2 * heads):
        raise ValueError(f"{rows} rows do not split into {heads} heads of an even size")
    return weight.view(heads, -1, 2, columns).transpose(1, 2).reshape(rows, columns)


def convert(gguf_path: Path, out_dir: Path, *, progress: Callable[[str], object] = str) -> None:
    """Write the checkpoint `out_dir` (config, tokenizer, bf16 safetensors) from `gguf_path`.

    `progress` is called with the name of each tensor as it is converted.

    Raises:
        ValueError: the file is not a Llama model or uses a tokenizer other than byte-level BPE.
    """
    import gguf

    reader = gguf.GGUFReader(str(gguf_path))
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    shape = read_shape(metadata)
    out_dir.mkdir(parents=True, exist_ok=True)
    tensors = dict(_tensors(reader, shape, progress))
    tied = "lm_head.weight" not in tensors
    save_file(tensors, out_dir / "model.safetensors", metadata={"format": "pt"})
    _write_json(out_dir / "config.json", model_config(shape, metadata, tied=tied))
    _write_json(out_dir / "generation_config.json", _special_ids(metadata))
    write_tokenizer(metadata, out_dir)


def read_shape(metadata: dict[str, Any]) -> Shape:
    """The model's sizes from GGUF metadata; refuses architectures other than `llama`."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"general.architecture: expected 'llama', found {architecture!r}")
    return Shape(
        layers=metadata["llama.block_count"],
        hidden=metadata["llama.embedding_length"],
        intermediate=metadata["llama.feed_forward_length"],
        heads=metadata["llama.attention.head_count"],
        kv_heads=metadata["llama.attention.head_count_kv"],
        context=metadata["llama.context_length"],
        rope_theta=metadata["llama.rope.freq_base"],
        # GGUF keeps it as float32; the shortest decimal that rounds to it is what was meant.
        norm_eps=float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
    )


def model_config(shape: Shape, metadata: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """The contents of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        **_special_ids(metadata),
    }


def write_tokenizer(metadata: dict[str, Any], out_dir: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json for a byte-level BPE vocabulary.

    Raises:
        ValueError: `tokenizer.ggml.model` / `.pre` name another kind of tokenizer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"tokenizer.ggml.model/.pre: expected ('gpt2', 'smollm'), found {kind}")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    control = [text for text, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in control])
    tokenizer.save(str(out_dir / "tokenizer.json"))

    ids = _special_ids(metadata)
    _write_json(
        out_dir / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[ids["bos_token_id"]],
            "eos_token": tokens[ids["eos_token_id"]],
            "pad_token": tokens[ids["pad_token_id"]],
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": metadata["llama.context_length"],
            "chat_template": metadata["tokenizer.chat_template"],
        },
    )


def _tensors(
    reader: Any, shape: Shape, progress: Callable[[str], object]
) -> Iterator[tuple[str, torch.Tensor]]:
    import gguf

    for tensor in reader.tensors:
        progress(tensor.name)
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name.endswith("attn_q.weight"):
            weight = unpermute_rope(weight, shape.heads)
        elif tensor.name.endswith("attn_k.weight"):
            weight = unpermute_rope(weight, shape.kv_heads)
        yield hf_name(tensor.name), weight.to(torch.bfloat16).contiguous()


def _special_ids(metadata: dict[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
