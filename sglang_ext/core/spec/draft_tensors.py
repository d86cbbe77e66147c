"""Which tensors a draft checkpoint must hold, and a check of safetensors headers against that.

Reading headers costs milliseconds, so a draft that does not fit is refused before any weight of
the target is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from sglang_ext.core.safetensors_header import Shape, read_header
from sglang_ext.core.spec.draft_config import DraftConfig
from sglang_ext.core.spec.draft_fields import DraftConfigError

# Shipped by DeepSpec drafts although the target's are used.
SHARED_WITH_TARGET = ("embed_tokens.weight", "lm_head.weight")


def _layer(config: DraftConfig, index: int) -> Iterator[tuple[str, Shape]]:
    hidden, head_dim = config.hidden_size, config.head_dim
    q, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    prefix = f"layers.{index}."
    yield f"{prefix}input_layernorm.weight", (hidden,)
    yield f"{prefix}post_attention_layernorm.weight", (hidden,)
    yield f"{prefix}self_attn.q_proj.weight", (q, hidden)
    yield f"{prefix}self_attn.k_proj.weight", (kv, hidden)
    yield f"{prefix}self_attn.v_proj.weight", (kv, hidden)
    yield f"{prefix}self_attn.o_proj.weight", (hidden, q)
    yield f"{prefix}self_attn.q_norm.weight", (head_dim,)
    yield f"{prefix}self_attn.k_norm.weight", (head_dim,)
    yield f"{prefix}mlp.gate_proj.weight", (config.intermediate_size, hidden)
    yield f"{prefix}mlp.up_proj.weight", (config.intermediate_size, hidden)
    yield f"{prefix}mlp.down_proj.weight", (hidden, config.intermediate_size)
    if config.conv_kernel_size:
        taps = config.conv_kernel_size
        for name in ("attention_conv", "mlp_conv"):
            yield f"{prefix}{name}.base_kernel", (2, taps, hidden)
            yield (
                f"{prefix}{name}.kernel_projection.weight",
                (2 * taps * (hidden // config.conv_group_size), hidden),
            )


def _markov(config: DraftConfig) -> Iterator[tuple[str, Shape]]:
    rank, hidden = config.markov_rank, config.hidden_size
    yield "markov_head.markov_w1.weight", (config.stored_vocab_size, rank)
    yield "markov_head.markov_w2.weight", (config.stored_draft_vocab_size, rank)
    if config.markov_head_type == "gated":
        yield "markov_head.gate_proj.weight", (rank, hidden + rank)
        yield "markov_head.gate_proj.bias", (rank,)
    if config.markov_head_type == "rnn":
        yield "markov_head.joint_proj.weight", (3 * rank, 2 * rank + hidden)
        yield "markov_head.joint_proj.bias", (3 * rank,)


def required_tensors(config: DraftConfig) -> dict[str, Shape]:
    """Name to shape of every tensor the drafter reads."""
    hidden = config.hidden_size
    table: dict[str, Shape] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(config.num_hidden_layers):
        table.update(_layer(config, index))
    if config.markov_rank:
        table.update(_markov(config))
    if config.confidence_head:
        width = hidden + (config.markov_rank if config.confidence_with_markov else 0)
        table["confidence_head.proj.weight"] = (1, width)
        table["confidence_head.proj.bias"] = (1,)
    if config.selector_rank:
        rank = config.selector_rank
        table["candidate_selector.predecessor_codebook"] = (config.stored_vocab_size, rank)
        table["candidate_selector.successor_codebook"] = (config.stored_vocab_size, rank)
        table["candidate_selector.hidden_projection.weight"] = (rank, hidden)
    if config.reduced_vocab:
        table["d2t"] = (config.draft_vocab_size,)
    return table


def optional_tensors(config: DraftConfig) -> dict[str, Shape]:
    """Tensors that may be there: the shared modules, and EAGLE-3's target-to-draft flags."""
    return {
        "embed_tokens.weight": (config.stored_vocab_size, config.hidden_size),
        "lm_head.weight": (config.stored_draft_vocab_size, config.hidden_size),
        "t2d": (config.stored_vocab_size,),
    }


def padded_tensors(config: DraftConfig) -> set[str]:
    """Names of required tensors that have a row for every token the checkpoint stores."""
    if config.stored_vocab_size == config.vocab_size:
        return set()
    stored = config.stored_vocab_size
    return {name for name, shape in required_tensors(config).items() if shape[0] == stored}


def canonical(name: str) -> str:
    """A tensor's name without the `model.` some exporters put in front."""
    return name.removeprefix("model.")


def check_tensors(config: DraftConfig, found: Mapping[str, Shape]) -> None:
    """Hold `found` (canonical name to shape) to the checkpoint's config.

    Raises DraftConfigError for a missing, surplus or misshaped tensor.
    """
    required, optional = required_tensors(config), optional_tensors(config)
    for name, shape in required.items():
        if name not in found:
            raise DraftConfigError(
                name,
                expected=f"a tensor of shape {list(shape)}",
                found="no such tensor",
                remedy=_missing_remedy(found),
            )
    for name, shape in found.items():
        expected = required.get(name) or optional.get(name)
        if expected is None:
            raise DraftConfigError(
                name,
                expected="no such tensor in this kind of draft",
                found=f"shape {list(shape)}",
                remedy="config.json and the weights describe different drafts; "
                "download them together.",
            )
        if tuple(shape) != expected:
            raise DraftConfigError(
                name,
                expected=f"shape {list(expected)}",
                found=list(shape),
                remedy="config.json and the weights describe different drafts, "
                "or the draft was trained for another target.",
            )


def _missing_remedy(found: Mapping[str, Shape]) -> str:
    if not any(name.startswith(("fc.", "hidden_norm")) for name in found):
        names = ", ".join(sorted(found)[:4]) or "nothing"
        return f"This checkpoint has no draft in it (it holds {names}, ...)."
    return "Download the draft again; config.json and the weights do not belong together."


def read_headers(path: str | Path) -> dict[str, Shape]:
    """Canonical name to shape of every tensor in a folder's safetensors files.

    Raises DraftConfigError for a folder without weights and for a truncated file.
    """
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise DraftConfigError(
            "weights",
            expected=f"*.safetensors in {path}",
            found="none",
            remedy="Download the draft's weights beside its config.json.",
        )
    return {
        canonical(name): shape
        for file in files
        for name, shape in read_header(file, DraftConfigError).items()
    }
