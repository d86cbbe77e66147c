"""A draft checkpoint's config.json, read strictly into one frozen record.

Three public conventions are read: z-lab's (`dflash_config` nested, mask row predicts its own
position), DeepSpec's (flat keys, anchor row predicts) and DFlash 2's (z-lab plus convolution and
selector). What is ambiguous or does not fit is refused: a draft read one row off still runs, it
just never gets accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sglang_ext.core.spec.draft_fields import DraftConfigError, FieldReader

MARKOV_HEADS = ("vanilla", "gated", "rnn")
_OWN_POSITION = ("DFlashDraftModel", "DFlash2DraftModel")
# The draft inside a DeepSeek-V4 checkpoint, under the name this package gives it.
BUNDLED_V4 = "SglangExtDeepseekV4DSpark"


@dataclass(frozen=True)
class TargetFacts:
    """What a draft must agree with: the target's depth, width, vocabulary and rope base.

    outputs_captured: whether features are what comes OUT of a layer, as DeepSeek-V4's. SGLang's
        dense models hand out what goes INTO the next layer, so nothing behind the last one.
    """

    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    rope_theta: float | None = None
    outputs_captured: bool = False

    @property
    def last_feature_layer(self) -> int:
        """The last layer that a draft may read."""
        return self.num_hidden_layers - (1 if self.outputs_captured else 2)


@dataclass(frozen=True)
class DraftConfig:
    """Everything the drafter and its model file need to know about a checkpoint.

    block_size: the checkpoint's own number: gamma for anchor-predicts layouts, gamma + 1 for
        z-lab's. `max_gamma` is the number to use.
    anchor_predicts: row 0 of the block (the anchor) predicts the next token.
    drop_anchor_row: gamma + 1 query rows are run and the anchor's is thrown away.
    layer_windows: per draft layer, tokens of context a row may see; 0 is all of it.
    """

    algorithm: str
    architecture: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    stored_vocab_size: int
    layer_windows: tuple[int, ...]
    layer_causal: tuple[bool, ...]
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    target_layer_ids_guessed: bool
    anchor_predicts: bool
    drop_anchor_row: bool
    markov_rank: int
    markov_head_type: str
    confidence_head: bool
    confidence_with_markov: bool
    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float

    @property
    def max_gamma(self) -> int:
        """Most tokens the checkpoint was trained to draft in one round."""
        return (
            self.block_size
            if self.anchor_predicts or self.drop_anchor_row
            else (self.block_size - 1)
        )

    @property
    def reduced_vocab(self) -> bool:
        """Whether draft token ids are mapped to target ids by a `d2t` tensor."""
        return self.draft_vocab_size != self.vocab_size

    @property
    def stored_draft_vocab_size(self) -> int:
        """Rows of tables over draft tokens in the checkpoint, padding included."""
        return self.draft_vocab_size if self.reduced_vocab else self.stored_vocab_size

    def query_rows(self, gamma: int) -> int:
        """Rows of the draft block for `gamma` drafted tokens."""
        return gamma if self.anchor_predicts else gamma + 1


def default_target_layer_ids(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """z-lab's rule: spread over layers 1 .. L-3, the middle one for a single draft layer."""
    if draft_layers == 1:
        return (target_layers // 2,)
    span = target_layers - 4
    return tuple(round(1 + i * span / (draft_layers - 1)) for i in range(draft_layers))


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise DraftConfigError(
            "architectures",
            expected="a list with one name",
            found=names,
            remedy="A draft checkpoint names its architecture, e.g. DFlashDraftModel.",
        )
    return names[0]


def _refuse_foreign(raw: Mapping[str, Any]) -> None:
    for key in ("speculators_config", "speculators_model_type", "speculators_version"):
        if key in raw:
            raise DraftConfigError(
                key,
                expected="a z-lab, DeepSpec or DFlash 2 checkpoint",
                found=raw[key],
                remedy="The speculators format numbers its block slots differently; "
                "convert the draft to one of the formats above.",
            )


def _check_algorithm(algorithm: str, architecture: str, markov_rank: int) -> None:
    if algorithm == "DSPARK" and markov_rank == 0:
        raise DraftConfigError(
            "markov_rank",
            expected="at least 1 for DSPARK",
            found=markov_rank,
            remedy=f"{architecture} has no Markov head; serve it with "
            "--speculative-algorithm DFLASH.",
        )
    if algorithm == "DFLASH" and (markov_rank > 0 or "DSpark" in architecture):
        raise DraftConfigError(
            "markov_rank",
            expected="0 for DFLASH",
            found=markov_rank,
            remedy=f"{architecture} has a Markov head; serve it with "
            "--speculative-algorithm DSPARK.",
        )


def _anchor_layout(reader: FieldReader, algorithm: str, architecture: str) -> tuple[bool, bool]:
    """(anchor_predicts, drop_anchor_row) of the block layout."""
    explicit = reader.get("sample_from_anchor")
    if explicit is not None:
        anchor = reader.flag("sample_from_anchor", True)
        return anchor, algorithm == "DSPARK" and not anchor
    if algorithm == "DSPARK":
        return True, False
    if architecture in _OWN_POSITION:
        return False, False
    if architecture.endswith("DFlashModel"):
        return True, False
    raise DraftConfigError(
        "architectures",
        expected=f"one of {', '.join(_OWN_POSITION)} or a name that ends in DFlashModel",
        found=architecture,
        remedy="Add sample_from_anchor to config.json: true when the anchor row predicts the "
        "first draft, false when each mask row predicts its own position.",
    )


def _layer_masks(reader: FieldReader, layers: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """(window, causal) per layer; a window of 0 is the whole context.

    SGLang's rule: sliding layers are causal unless `is_causal` says otherwise, full layers are
    bidirectional over context and block unless it says so.
    """
    types = reader.get("layer_types") or ["full_attention"] * layers
    known = {"full_attention", "sliding_attention"}
    if not isinstance(types, list) or len(types) != layers or not set(types) <= known:
        raise DraftConfigError(
            "layer_types",
            expected=f"{layers} names out of {sorted(known)}",
            found=types,
            remedy="Correct the draft's config.json.",
        )
    sliding = [name == "sliding_attention" for name in types]
    window = reader.integer("sliding_window", minimum=1) if any(sliding) else 0
    causal = reader.get("is_causal")
    return (
        tuple(window if is_sliding else 0 for is_sliding in sliding),
        tuple(is_sliding if causal is None else bool(causal) for is_sliding in sliding),
    )


def _layer_ids(
    reader: FieldReader, layers: int, target: TargetFacts
) -> tuple[tuple[int, ...], bool]:
    given = reader.get("target_layer_ids")
    last = target.last_feature_layer
    if given is None:
        return default_target_layer_ids(target.num_hidden_layers, layers), True
    valid = (
        isinstance(given, list)
        and len(given) > 0
        and all(isinstance(i, int) and not isinstance(i, bool) for i in given)
        and all(0 <= i <= last for i in given)
        and all(a < b for a, b in pairwise(given))
    )
    if not valid:
        raise DraftConfigError(
            "target_layer_ids",
            expected=f"strictly increasing layer numbers from 0 to {last}",
            found=given,
            remedy="This draft was trained for another target; use the draft made for this one.",
        )
    return tuple(given), False


def _rope_theta(reader: FieldReader, target: TargetFacts) -> tuple[float, Mapping[str, Any] | None]:
    parameters = reader.get("rope_parameters") or {}
    theta = reader.get("rope_theta", parameters.get("rope_theta"))
    if theta is None:
        raise DraftConfigError(
            "rope_theta",
            expected="a number",
            found=None,
            remedy="Correct the draft's config.json.",
        )
    if target.rope_theta is not None and float(theta) != float(target.rope_theta):
        raise DraftConfigError(
            "rope_theta",
            expected=f"{target.rope_theta}, as the target's",
            found=theta,
            remedy="This draft was trained for another target; use the draft made for this one.",
        )
    scaling = reader.get("rope_scaling")
    if scaling is None and parameters.get("rope_type", "default") != "default":
        scaling = parameters
    return float(theta), scaling


def _match_target(reader: FieldReader, target: TargetFacts) -> None:
    for key, expected in (
        ("hidden_size", target.hidden_size),
        ("num_target_layers", target.num_hidden_layers),
    ):
        found = reader.get(key)
        if found is not None and found != expected:
            raise DraftConfigError(
                key,
                expected=f"{expected}, as the target's",
                found=found,
                remedy="This draft was trained for another target; "
                "use the draft made for this one.",
            )


# Tables are padded to a multiple of one of these, for kernels and for ranks.
_PADDED_TO = (64, 128, 256, 512, 1024)


def _vocab(reader: FieldReader, target: TargetFacts) -> tuple[int, int, int]:
    """(vocab_size, draft_vocab_size, rows stored); a checkpoint may leave the first to the target.

    Rows beyond the target's vocabulary are padding and are not read.
    """
    vocab = target.vocab_size
    stored = reader.integer("vocab_size", minimum=1, default=vocab)
    if stored not in (vocab, *(-(-vocab // to) * to for to in _PADDED_TO)):
        raise DraftConfigError(
            "vocab_size",
            expected=f"{vocab}, as the target's, or that padded to a multiple of 64 to 1024",
            found=stored,
            remedy="This draft was trained for another target; use the draft made for this one.",
        )
    draft = reader.integer("draft_vocab_size", minimum=1, default=stored)
    if vocab < draft != stored:
        raise DraftConfigError(
            "draft_vocab_size",
            expected=f"at most {vocab}, or {stored} as vocab_size",
            found=draft,
            remedy="Correct the draft's config.json.",
        )
    return vocab, min(vocab, draft), stored


def _markov(reader: FieldReader) -> tuple[int, str]:
    rank = reader.integer("markov_rank", minimum=0, default=0)
    head = reader.get("markov_head_type", "vanilla" if rank == 0 else None)
    if head not in MARKOV_HEADS:
        raise DraftConfigError(
            "markov_head_type",
            expected=f"one of {', '.join(MARKOV_HEADS)}",
            found=head,
            remedy="Correct the draft's config.json.",
        )
    return rank, head


def _paired(reader: FieldReader, first: str, second: str) -> tuple[int, int]:
    a = reader.integer(first, minimum=0, default=0)
    b = reader.integer(second, minimum=0, default=0)
    if bool(a) != bool(b):
        raise DraftConfigError(
            second,
            expected=f"given together with {first}={a}",
            found=b,
            remedy="Correct the draft's config.json.",
        )
    return a, b


def parse(raw: Mapping[str, Any], *, algorithm: str, target: TargetFacts) -> DraftConfig:
    """Read `raw` (config.json) for `algorithm` ("DFLASH" or "DSPARK") and hold it to the target.

    Raises DraftConfigError naming the field, what was expected, what was found and the remedy.
    """
    _refuse_foreign(raw)
    reader = FieldReader(raw)
    architecture = _architecture(raw)
    rank, head = _markov(reader)
    _check_algorithm(algorithm, architecture, rank)
    _match_target(reader, target)
    anchor_predicts, drop_anchor = _anchor_layout(reader, algorithm, architecture)
    layers = reader.integer("num_hidden_layers", minimum=1)
    hidden = reader.integer("hidden_size", minimum=1)
    heads = reader.integer("num_attention_heads", minimum=1)
    windows, causal = _layer_masks(reader, layers)
    ids, guessed = _layer_ids(reader, layers, target)
    theta, scaling = _rope_theta(reader, target)
    vocab, draft_vocab, stored_vocab = _vocab(reader, target)
    kernel, group = _paired(reader, "conv_kernel_size", "conv_group_size")
    selector_rank, selector_top_k = _paired(reader, "selector_rank", "selector_top_k")
    return DraftConfig(
        algorithm=algorithm,
        architecture=architecture,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=reader.integer("num_key_value_heads", minimum=1, default=heads),
        head_dim=reader.integer("head_dim", minimum=2, default=hidden // heads),
        intermediate_size=reader.integer("intermediate_size", minimum=1),
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=reader.integer("max_position_embeddings", minimum=1),
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        stored_vocab_size=stored_vocab,
        layer_windows=windows,
        layer_causal=causal,
        block_size=reader.integer("block_size", minimum=1 if anchor_predicts else 2),
        mask_token_id=_mask_token(reader, vocab),
        target_layer_ids=ids,
        target_layer_ids_guessed=guessed,
        anchor_predicts=anchor_predicts,
        drop_anchor_row=drop_anchor,
        markov_rank=rank,
        markov_head_type=head,
        confidence_head=reader.flag("enable_confidence_head", False),
        confidence_with_markov=reader.flag("confidence_head_with_markov", False),
        conv_kernel_size=kernel,
        conv_group_size=group,
        selector_rank=selector_rank,
        selector_top_k=selector_top_k,
        input_embedding_scale=reader.number("input_embedding_scale", 1.0),
        output_multiplier=reader.number("output_multiplier", 1.0),
        final_logit_softcapping=reader.number("final_logit_softcapping", 0.0),
    )


def _mask_token(reader: FieldReader, vocab: int) -> int:
    token = reader.integer("mask_token_id", minimum=0)
    if token >= vocab:
        raise DraftConfigError(
            "mask_token_id",
            expected=f"a token below the target's vocabulary of {vocab}",
            found=token,
            remedy="This draft was trained for another target; use the draft made for this one.",
        )
    return token


def check_gamma(config: DraftConfig, gamma: int) -> None:
    """Refuse a gamma the checkpoint was not trained for: acceptance collapses beyond its block."""
    if not 1 <= gamma <= config.max_gamma:
        raise DraftConfigError(
            "gamma",
            expected=f"1 to {config.max_gamma}, the block the checkpoint was trained with",
            found=gamma,
            remedy="Leave --speculative-dspark-block-size / --speculative-dflash-block-size / "
            "--speculative-num-draft-tokens out to use the checkpoint's own.",
        )
