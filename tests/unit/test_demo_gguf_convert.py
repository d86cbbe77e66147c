"""GGUF conversion: names, llama.cpp's rope row order, and a whole tiny model against HF."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sglang_ext.demo.gguf_convert import convert, hf_name, unpermute_rope

gguf = pytest.importorskip("gguf")

HIDDEN, HEADS, KV_HEADS, LAYERS, FFN, CONTEXT = 32, 4, 2, 3, 48, 64
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "c", "ab", "Ġ", "Ċ", "1", "2"]


def llama_cpp_permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The row order that llama.cpp's own converter writes."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (3, 10), (9, 64)])
def test_unpermute_inverts_llama_cpps_order(heads: int, head_dim: int) -> None:
    weight = torch.randn(heads * head_dim, 7)
    assert torch.equal(unpermute_rope(llama_cpp_permute(weight, heads), heads), weight)


def test_unpermute_refuses_odd_heads() -> None:
    with pytest.raises(ValueError, match="do not split"):
        unpermute_rope(torch.randn(15, 4), 3)


def test_names() -> None:
    assert hf_name("blk.12.ffn_gate.weight") == "model.layers.12.mlp.gate_proj.weight"
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"


def test_a_tensor_of_another_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_gate_exps"):
        hf_name("blk.0.ffn_gate_exps.weight")


def hf_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    head_dim = HIDDEN // HEADS

    def draw(*shape: int) -> torch.Tensor:
        # bf16 values, so that the conversion must give back the very same numbers
        return (torch.randn(*shape, generator=generator) * 0.2).bfloat16().float()

    weights = {"token_embd": draw(len(TOKENS), HIDDEN), "output_norm": draw(HIDDEN)}
    for layer in range(LAYERS):
        weights |= {
            f"blk.{layer}.attn_norm": draw(HIDDEN),
            f"blk.{layer}.attn_q": draw(HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k": draw(KV_HEADS * head_dim, HIDDEN),
            f"blk.{layer}.attn_v": draw(KV_HEADS * head_dim, HIDDEN),
            f"blk.{layer}.attn_output": draw(HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_norm": draw(HIDDEN),
            f"blk.{layer}.ffn_gate": draw(FFN, HIDDEN),
            f"blk.{layer}.ffn_up": draw(FFN, HIDDEN),
            f"blk.{layer}.ffn_down": draw(HIDDEN, FFN),
        }
    return weights


def write_gguf(path: Path, weights: dict[str, torch.Tensor], architecture: str = "llama") -> None:
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, weight in weights.items():
        stored = weight
        if name.endswith("attn_q"):
            stored = llama_cpp_permute(weight, HEADS)
        elif name.endswith("attn_k"):
            stored = llama_cpp_permute(weight, KV_HEADS)
        writer.add_tensor(f"{name}.weight", np.ascontiguousarray(stored.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_whole_model_comes_back(tmp_path: Path) -> None:
    weights = hf_weights()
    write_gguf(tmp_path / "tiny.gguf", weights)
    convert(tmp_path / "tiny.gguf", tmp_path / "out")

    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {hf_name(f"{name}.weight") for name in weights} == set(found)
    for name, weight in weights.items():
        assert torch.equal(found[hf_name(f"{name}.weight")].float(), weight), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["rms_norm_eps"] == 1e-5
    assert config["num_key_value_heads"] == KV_HEADS


def test_the_tokenizer_splits_digits_and_keeps_control_tokens_whole(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_gguf(tmp_path / "tiny.gguf", hf_weights())
    convert(tmp_path / "tiny.gguf", tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("ab12<|im_end|>")["input_ids"] == [6, 9, 10, 2]
    assert tokenizer.eos_token_id == 2
    assert tokenizer.decode([6, 7, 3]) == "ab a"
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert rendered == "ab"


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", hf_weights(), architecture="gemma")
    with pytest.raises(ValueError, match=r"general\.architecture.*'llama'.*'gemma'"):
        convert(tmp_path / "tiny.gguf", tmp_path / "out")
