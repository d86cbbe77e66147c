"""Tensors of a DeepSeek-V4 checkpoint: which there must be, how large, and where each goes.

The published names are the reference here. transformers writes others, both those of its modules
and a mixture when it saves; `canonical` brings them to the published ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor

from sglang_ext.core.compress import CSA, series_of
from sglang_ext.srt.models.deepseek_v4_config import DeepseekV4Config
from sglang_ext.srt.models.placement import Placement

Shape = tuple[int, ...]
SCALE = ".scale"
# Begins of the names of the draft that a checkpoint may carry, and of the target's.
DRAFT_NAMES = ("mtp.",)
TARGET_NAMES = ("layers.", "embed.", "head.", "norm.", "hc_head_")
_EXPERT = re.compile(r"(.+\.ffn\.experts)\.(\d+)\.(w[123])\.weight")
_SHARED = re.compile(r"(.+\.ffn\.shared_experts)\.(w[13])\.weight")
_FUSED = re.compile(r"(.+\.ffn\.experts)\.(gate_up_proj|down_proj)")

_RENAMED: tuple[tuple[str, str], ...] = tuple(
    (pattern, target)
    for pattern, target in (
        (r"^model\.", ""),
        (r"_scale_inv$", "_scale"),
        (r"\.weight_scale$", SCALE),
        (r"^embed_tokens\.", "embed."),
        (r"^lm_head\.", "head."),
        (r"^hc_head\.hc_", "hc_head_"),
        (r"\.self_attn\.", ".attn."),
        (r"\.mlp\.", ".ffn."),
        (r"\.compressor\.indexer\.", ".indexer.compressor."),
        (r"\.indexer\.compressor\.scorer\.weights_proj\.", ".indexer.weights_proj."),
        (r"\.indexer\.compressor\.(?:q_b_proj|wq_b)\.", ".indexer.wq_b."),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.attn_hc\.", ".hc_attn_"),
        (r"\.ffn_hc\.", ".hc_ffn_"),
        (r"\.sinks$", ".attn_sink"),
        (r"\.compressor\.kv_norm\.", ".compressor.norm."),
        (r"\.attn\.norm\.", ".attn.kv_norm."),
        (r"\.position_bias$", ".ape"),
        (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
        (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
        (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
        (r"\.compressor\.kv_proj\.", ".compressor.wkv."),
        (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
        (r"\.q_a_proj\.", ".wq_a."),
        (r"\.q_a_norm\.", ".q_norm."),
        (r"\.q_b_proj\.", ".wq_b."),
        (r"\.attn\.kv_proj\.", ".attn.wkv."),
        (r"\.o_a_proj\.", ".wo_a."),
        (r"\.o_b_proj\.", ".wo_b."),
        (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
    )
)


def canonical(name: str) -> str:
    """The published name of a tensor under any of the known spellings."""
    for pattern, target in _RENAMED:
        name = re.sub(pattern, target, name)
    return name


def split_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A published-style pair per expert from transformers' fused ones; others unchanged.

    gate_up_proj is [experts, 2 * intermediate, hidden], down_proj [experts, hidden, intermediate].
    """
    fused = _FUSED.fullmatch(name)
    if fused is None:
        yield name, tensor
        return
    for expert, weight in enumerate(tensor):
        if fused[2] == "down_proj":
            yield f"{fused[1]}.{expert}.w2.weight", weight
            continue
        for part, half in zip(("w1", "w3"), weight.chunk(2), strict=True):
            yield f"{fused[1]}.{expert}.{part}.weight", half


def placement(name: str) -> Placement:
    """Where a tensor of the target goes, by its published name."""
    expert = _EXPERT.fullmatch(name)
    if expert:
        merged = "w2_weight" if expert[3] == "w2" else "w13_weight"
        return Placement(f"model.{expert[1]}.{merged}", expert[3], int(expert[2]))
    shared = _SHARED.fullmatch(name)
    if shared:
        return Placement(f"model.{shared[1]}.w13.weight", 0 if shared[2] == "w1" else 1)
    if name == "head.weight":
        return Placement("lm_head.weight")
    return Placement(f"model.{name}")


def _compressor(config: DeepseekV4Config, ratio: int, dim: int) -> dict[str, Shape]:
    wide = series_of(ratio) * dim
    return {
        "wkv.weight": (wide, config.hidden_size),
        "wgate.weight": (wide, config.hidden_size),
        "ape": (ratio, wide),
        "norm.weight": (dim,),
    }


def _attention(config: DeepseekV4Config, ratio: int) -> dict[str, Shape]:
    heads, dim, rank = config.num_attention_heads, config.head_dim, config.q_lora_rank
    out = config.o_groups * config.o_lora_rank
    shapes: dict[str, Shape] = {
        "wq_a.weight": (rank, config.hidden_size),
        "q_norm.weight": (rank,),
        "wq_b.weight": (heads * dim, rank),
        "wkv.weight": (dim, config.hidden_size),
        "kv_norm.weight": (dim,),
        "wo_a.weight": (out, config.group_width),
        "wo_b.weight": (config.hidden_size, out),
        "attn_sink": (heads,),
    }
    if ratio:
        main = _compressor(config, ratio, dim)
        shapes |= {f"compressor.{name}": shape for name, shape in main.items()}
    if ratio == CSA:
        own = _compressor(config, ratio, config.index_head_dim)
        shapes |= {f"indexer.compressor.{name}": shape for name, shape in own.items()}
        shapes["indexer.wq_b.weight"] = (config.index_n_heads * config.index_head_dim, rank)
        shapes["indexer.weights_proj.weight"] = (config.index_n_heads, config.hidden_size)
    return shapes


def _expert(config: DeepseekV4Config) -> dict[str, Shape]:
    up = (config.moe_intermediate_size, config.hidden_size)
    return {"w1.weight": up, "w2.weight": up[::-1], "w3.weight": up}


def _moe(config: DeepseekV4Config, *, hashed: bool) -> dict[str, Shape]:
    experts = config.n_routed_experts
    shapes: dict[str, Shape] = {"gate.weight": (experts, config.hidden_size)}
    if hashed:
        shapes["gate.tid2eid"] = (config.vocab_size, config.num_experts_per_tok)
    else:
        shapes["gate.bias"] = (experts,)
    for owner in ("shared_experts", *(f"experts.{e}" for e in range(experts))):
        shapes |= {f"{owner}.{name}": shape for name, shape in _expert(config).items()}
    return shapes


def block_tensors(config: DeepseekV4Config, ratio: int, *, hashed: bool) -> dict[str, Shape]:
    """Names below `layers.N.` (or a draft stage's `mtp.N.`) with whole, unsharded shapes."""
    hidden, n = config.hidden_size, config.hc_mult
    shapes: dict[str, Shape] = {"attn_norm.weight": (hidden,), "ffn_norm.weight": (hidden,)}
    for part in ("hc_attn", "hc_ffn"):
        shapes[f"{part}_fn"] = (n * (2 + n), n * hidden)
        shapes[f"{part}_base"] = (n * (2 + n),)
        shapes[f"{part}_scale"] = (3,)
    shapes |= {f"attn.{name}": shape for name, shape in _attention(config, ratio).items()}
    return shapes | {f"ffn.{name}": shape for name, shape in _moe(config, hashed=hashed).items()}


def head_tensors(config: DeepseekV4Config) -> dict[str, Shape]:
    """What turns streams into one normalised hidden state."""
    hidden, n = config.hidden_size, config.hc_mult
    return {
        "norm.weight": (hidden,),
        "hc_head_fn": (n, n * hidden),
        "hc_head_base": (n,),
        "hc_head_scale": (1,),
    }


def required_tensors(config: DeepseekV4Config) -> dict[str, Shape]:
    """Every tensor the target needs, by published name, with its whole, unsharded shape."""
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, Shape] = {"embed.weight": table, "head.weight": table}
    shapes |= head_tensors(config)
    for layer, ratio in enumerate(config.compress_ratios):
        own = block_tensors(config, ratio, hashed=config.is_hash(layer))
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    return shapes


def dspark_tensors(config: DeepseekV4Config) -> dict[str, Shape]:
    """Every tensor of the bundled DSpark draft: complete stages, its input and its heads.

    Raises:
        ValueError: a config without one.
    """
    facts = config.dspark
    if facts is None:
        raise ValueError("dspark_block_size: expected in config.json, found nothing")
    hidden, rank, last = config.hidden_size, facts.markov_rank, f"mtp.{facts.stages - 1}"
    shapes: dict[str, Shape] = {
        "mtp.0.main_proj.weight": (hidden, len(facts.target_layer_ids) * hidden),
        "mtp.0.main_norm.weight": (hidden,),
    }
    for stage in range(facts.stages):
        own = block_tensors(config, 0, hashed=False)
        shapes |= {f"mtp.{stage}.{name}": shape for name, shape in own.items()}
    shapes |= {f"{last}.{name}": shape for name, shape in head_tensors(config).items()}
    shapes[f"{last}.markov_head.markov_w1.weight"] = (config.vocab_size, rank)
    shapes[f"{last}.markov_head.markov_w2.weight"] = (config.vocab_size, rank)
    shapes[f"{last}.confidence_head.proj.weight"] = (1, hidden + rank)
    return shapes


def mtp_tensors(config: DeepseekV4Config) -> dict[str, Shape]:
    """Every tensor of the MTP module: a complete layer, its two inputs and its head."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "e_proj.weight": (hidden, hidden),
        "h_proj.weight": (hidden, hidden),
    }
    shapes |= block_tensors(config, 0, hashed=False) | head_tensors(config)
    return {f"mtp.0.{name}": shape for name, shape in shapes.items()}


def is_draft(name: str) -> bool:
    """Whether a tensor belongs to the draft that a checkpoint may carry beside the target."""
    return name.startswith(DRAFT_NAMES)
