"""A Hugging Face Llama checkpoint as an f16 GGUF file, for llama.cpp to run the same weights.

It carries no tokenizer: the bench sends token ids.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open

_TOP_LEVEL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_PER_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Llama tensor."""
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    _, _, layer, kind = name.split(".", 3)
    return f"blk.{layer}.{_PER_LAYER[kind]}"


def permute_rope(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q_proj or k_proj [heads * head_dim, hidden] in the order of llama.cpp's rotation.

    It rotates neighbouring pairs, Hugging Face rotates (i, i + half).
    """
    rows, columns = weight.shape
    return weight.view(heads, 2, -1, columns).transpose(1, 2).reshape(rows, columns)


def write(source: Path, out: Path) -> None:
    """Write `out` from the checkpoint folder `source` (one safetensors file)."""
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(str(out), "llama")
    _describe(writer, config)
    heads = {
        "self_attn.q_proj.weight": config["num_attention_heads"],
        "self_attn.k_proj.weight": config["num_key_value_heads"],
    }
    with safe_open(source / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            weight = file.get_tensor(name).float()
            count = heads.get(name.split(".", 3)[-1])
            if count:
                weight = permute_rope(weight, count)
            # llama.cpp wants its norms in f32.
            kept = weight.half() if weight.dim() == 2 else weight
            writer.add_tensor(gguf_name(name), kept.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: Any, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(float(config.get("rope_theta") or rope["rope_theta"]))
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    write(args.source, args.out)


if __name__ == "__main__":
    main()
