"""Rules about speculation: who can run it, with which layouts, and its hidden caps."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_ext.launcher.view import View

OURS = ("DSPARK", "DFLASH")
# To SGLang the first is another name of the second.
NEXTN = ("NEXTN", "EAGLE")
# SGLang 0.5.23's, by the name that --speculative-algorithm takes.
ALGORITHMS = (*OURS, "EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "UNO")
# All-to-all backends over which DeepSeek-V4's own draft runs under data-parallel attention on a
# GPU: the worker of SGLang takes no other, and ours widens the draft's experts, which SGLang's
# layers there do not compute behind an exchange.
DRAFTABLE_A2A = ("none", "megamoe", "mori")


def algorithm_is_known(v: View) -> Iterator[tuple[str, str]]:
    if v.algorithm and v.algorithm not in ALGORITHMS:
        yield (
            f"SGLang 0.5.23 has no speculative algorithm {v.algorithm}.",
            f"Use one of {', '.join(ALGORITHMS)}.",
        )


def running_requests_are_set(v: View) -> Iterator[tuple[str, str]]:
    if v.algorithm and not v.has("max-running-requests"):
        yield (
            "SGLang caps speculation at 48 requests when no number is given"
            + (f" ({48 // v.sizes.dp} per group)." if v.sizes.dp > 1 else "."),
            "Set --max-running-requests.",
        )


def attention_groups_can_draft(v: View) -> Iterator[tuple[str, str]]:
    if v.algorithm not in OURS or v.sizes.dp == 1:
        return
    if not v.has("enable-dp-lm-head"):
        yield (
            f"{v.algorithm} borrows the target's head, which a group must have to itself.",
            "Add --enable-dp-lm-head.",
        )
    if v.is_v4 and not v.on_cpu and v.algorithm == "DSPARK" and v.a2a not in DRAFTABLE_A2A:
        yield (
            f"DeepSeek-V4's DSPARK does not draft over {v.a2a} under data-parallel attention.",
            f"Use --moe-a2a-backend {' or '.join(DRAFTABLE_A2A)}, or drop one of the two.",
        )


def model_can_be_drafted_for(v: View) -> Iterator[tuple[str, str]]:
    # On a CPU the model is this package's, which also hands its features to a separate draft.
    verified = ("DSPARK", "EAGLE", "NEXTN", *(("DFLASH",) if v.on_cpu else ()))
    if v.is_v4 and v.algorithm and v.algorithm not in verified:
        yield (
            f"DeepSeek-V4 verifies drafts of {', '.join(verified)}, not {v.algorithm}.",
            "Use --speculative-algorithm DSPARK.",
        )


def block_is_as_trained(v: View) -> Iterator[tuple[str, str]]:
    draft = v.launch.model.drafts.get(v.algorithm.lower())
    own_draft = draft is not None and v.text("speculative-draft-model-path") in ("", draft.path)
    if draft is not None and own_draft and v.draft_tokens > draft.gamma:
        yield (
            f"the draft was trained to draft {draft.gamma} tokens; asked for {v.draft_tokens}, it "
            "guesses badly at every position.",
            f"Use at most {draft.gamma}.",
        )
    if v.algorithm == "DSPARK" and v.has("speculative-num-draft-tokens"):
        asked = v.whole("speculative-num-draft-tokens")
        if asked != v.draft_tokens + 1:
            yield (
                f"--speculative-num-draft-tokens {asked} counts the anchor: block + 1 = "
                f"{v.draft_tokens + 1}.",
                "Drop it.",
            )


def steps_are_not_mixed(v: View) -> Iterator[tuple[str, str]]:
    if v.algorithm in OURS and v.has("enable-mixed-chunk"):
        yield (
            f"{v.algorithm} does not verify in a step that also prefills.",
            "Drop --enable-mixed-chunk.",
        )


# Of SGLang 0.5.23's --linear-replayssm-cache-len.
DEFAULT_RING = 16


def replay_ring_holds_two_rounds(v: View) -> Iterator[tuple[str, str]]:
    """SGLang allocates the ring of Kimi's delta attention so, after the weights are loaded."""
    layers = v.config.get("linear_attn_config")
    is_kda = isinstance(layers, dict) and layers.get("kda_layers")
    if not (v.algorithm and is_kda and v.has("enable-linear-replayssm-spec")):
        return
    ring, rows = v.whole("linear-replayssm-cache-len", DEFAULT_RING), v.draft_tokens + 1
    if ring < 2 * rows or ring & (ring - 1):
        yield (
            f"recurrent layers replay from a ring of {ring} rows; it has to be a power of two that "
            f"holds two verifications of {rows}.",
            f"Use --linear-replayssm-cache-len {1 << (2 * rows - 1).bit_length()}, or drop "
            "--enable-linear-replayssm-spec.",
        )


SPECULATION_RULES = (
    algorithm_is_known,
    running_requests_are_set,
    attention_groups_can_draft,
    model_can_be_drafted_for,
    block_is_as_trained,
    steps_are_not_mixed,
    replay_ring_holds_two_rounds,
)
