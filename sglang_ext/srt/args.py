"""Arguments of DSPARK and DFLASH where our worker runs: read the draft, decide gamma, or refuse.

Runs in the launcher, before any process is started and any weight is read: a draft that does not
fit ends the launch here, with the field at fault.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.arg_groups.overrides import (
    attention_backends_of,
    declare_resolution,
    model_config_of,
    resolved_view,
    resolving_view,
)
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.environ import envs

from sglang_ext.core.spec.calibration import StsTemperatures
from sglang_ext.core.spec.draft_config import (
    BUNDLED_V4,
    DraftConfig,
    TargetFacts,
    check_gamma,
    parse,
)
from sglang_ext.core.spec.draft_fields import DraftConfigError, read_config
from sglang_ext.core.spec.draft_tensors import check_tensors, read_headers
from sglang_ext.core.spec.sps import load_table
from sglang_ext.srt.models.deepseek_v4_config import OFFICIAL as DEEPSEEK_V4
from sglang_ext.srt.spec.bundled import carries_draft, draft_view
from sglang_ext.srt.spec.checkpoint import local_folder
from sglang_ext.srt.spec.policy import builtin_refusal, ours

logger = logging.getLogger(__name__)
SOURCE = "sglang_ext.speculative_args"


def resolve_ours(server_args: Any, algorithm: str) -> bool:
    """Resolve `algorithm` ("DSPARK" or "DFLASH") for our worker.

    Returns False, having done nothing, where SGLang's own worker is to run.
    Raises ValueError (or DraftConfigError) for what cannot be served exactly.
    """
    cfg = resolving_view(server_args)
    if not ours(algorithm, cfg):
        return False
    _refuse_unsupported(cfg, algorithm)
    target = model_config_of(server_args)
    _refuse_recurrent(target, algorithm)
    folder = _draft_folder(cfg, algorithm)
    draft = read_draft(folder, algorithm, target_facts(target))
    _refuse_exchanged(cfg, draft)
    gamma = _gamma(cfg, algorithm, draft)
    check_gamma(draft, gamma)
    _check_tables(cfg, gamma)
    if draft.target_layer_ids_guessed:
        logger.warning(
            "draft checkpoint, target_layer_ids: missing, so the published rule is used: %s. A "
            "draft trained on other layers is accepted far less often; ask its author for them.",
            list(draft.target_layer_ids),
        )
    decided: dict[str, Any] = {
        "speculative_draft_model_path": str(folder),
        "speculative_num_steps": 1,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": gamma + 1,
    }
    if (cfg.attn_dp_size or 1) > 1 and not cfg.enable_dp_lm_head:
        # The draft predicts with the target's head on one DP rank at a time: a head that is
        # sharded over all of them would need the idle ones.
        decided["enable_dp_lm_head"] = True
    backend = cfg.speculative_draft_attention_backend
    if backend is None:
        backend, _ = attention_backends_of(resolved_view(server_args))
        decided["speculative_draft_attention_backend"] = backend
    declare_resolution(server_args, SOURCE, **decided)
    if (cfg.attn_dp_size or 1) > 1 or cfg.moe_a2a_backend != "none":
        # A verification of unequal rows is padded row by row, beyond what SGLang's fixed input
        # buffers hold per request; without them the forward takes the batch as it is.
        envs.SGLANG_EAGER_INPUT_NO_COPY.set(True)
    why = builtin_refusal(algorithm, cfg) or "SGLANG_EXT_SPEC=always"
    logger.info("%s: our worker (%s), gamma %d, draft %s", algorithm, why, gamma, folder)
    return True


def check_draft_is_there(server_args: Any) -> None:
    """Raise DraftConfigError where our worker would run on a draft that has no config.json."""
    cfg = resolving_view(server_args)
    path, algorithm = cfg.speculative_draft_model_path, cfg.speculative_algorithm
    if path is not None and algorithm is not None and ours(str(algorithm).upper(), cfg):
        read_config(local_folder(path))


def target_facts(model_config: Any) -> TargetFacts:
    """What a draft is held to, from SGLang's ModelConfig of the target."""
    text = model_config.hf_text_config
    architectures = model_config.hf_config.architectures or ()
    rope = getattr(text, "rope_parameters", None) or {}
    theta = getattr(text, "rope_theta", None) or rope.get("rope_theta")
    return TargetFacts(
        num_hidden_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        rope_theta=theta,
        # SGLang's name, or the one this package gives it.
        outputs_captured=any(name.endswith(DEEPSEEK_V4) for name in architectures),
    )


def read_draft(folder: Path, algorithm: str, target: TargetFacts) -> DraftConfig:
    """The draft's config, held to the target and to the headers of its own weight files."""
    draft = parse(read_config(folder), algorithm=algorithm, target=target)
    # The view of a bundled draft was held to its tensors when it was made.
    if draft.architecture != BUNDLED_V4:
        check_tensors(draft, read_headers(folder))
    return draft


# Beside the folder, where a target may carry its draft.
_NO_BUNDLED = {"DSPARK": " and its config.json no dspark_* fields"}


def _draft_folder(cfg: Any, algorithm: str) -> Path:
    if cfg.speculative_draft_model_path is not None:
        given = local_folder(cfg.speculative_draft_model_path)
        return draft_view(given) if _bundled(given, algorithm) else given
    if _bundled(Path(cfg.model_path), algorithm):
        return draft_view(Path(cfg.model_path))
    inside = Path(cfg.model_path) / algorithm.lower()
    if (inside / "config.json").is_file():
        return inside
    raise DraftConfigError(
        "--speculative-draft-model-path",
        expected="a draft checkpoint",
        found=None,
        remedy=(
            f"Give the draft's path; {cfg.model_path} has no {algorithm.lower()}/ folder"
            f"{_NO_BUNDLED.get(algorithm, '')}."
        ),
    )


def _bundled(folder: Path, algorithm: str) -> bool:
    """Whether `folder` is a target that carries a DSPARK draft of its own."""
    file = folder / "config.json"
    return algorithm == "DSPARK" and file.is_file() and carries_draft(read_config(folder))


def _gamma(cfg: Any, algorithm: str, draft: DraftConfig) -> int:
    """Drafted tokens per round: what the flags say, else what the checkpoint was trained with."""
    rows = cfg.speculative_num_draft_tokens
    if algorithm == "DSPARK":
        block = cfg.speculative_dspark_block_size
        asked = {} if block is None else {"--speculative-dspark-block-size": int(block)}
    else:
        block = cfg.speculative_dflash_block_size
        asked = {} if block is None else {"--speculative-dflash-block-size": int(block) - 1}
    if rows is not None:
        asked["--speculative-num-draft-tokens"] = int(rows) - 1
    if len(set(asked.values())) > 1:
        raise DraftConfigError(
            " and ".join(asked),
            expected="the same number of drafted tokens",
            found=asked,
            remedy="Give one of them. --speculative-num-draft-tokens counts the anchor row too.",
        )
    return next(iter(asked.values()), draft.max_gamma)


def _check_tables(cfg: Any, gamma: int) -> None:
    if cfg.speculative_dspark_sps_table_path:
        load_table(cfg.speculative_dspark_sps_table_path)
    if cfg.speculative_dspark_confidence_sts_path:
        StsTemperatures.load(cfg.speculative_dspark_confidence_sts_path).tensor(gamma)


_UNSUPPORTED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("--pp-size", lambda c: c.pp_size != 1, "the draft reads layers that other stages hold"),
    (
        "--enable-two-batch-overlap",
        lambda c: bool(c.enable_two_batch_overlap) and not str(c.device).startswith("cpu"),
        "a verification is cut in halves on a CPU only",
    ),
    (
        "--disaggregation-mode",
        lambda c: c.disaggregation_mode != "null",
        "the draft's K/V are not transferred between prefill and decode servers",
    ),
    (
        "--enable-hierarchical-cache",
        lambda c: bool(c.enable_hierarchical_cache),
        "the host cache does not carry the draft's K/V",
    ),
    (
        "--speculative-draft-window-size",
        lambda c: c.speculative_draft_window_size is not None,
        "a draft's window comes from its own layer_types and sliding_window",
    ),
    (
        "--speculative-use-block-verification",
        lambda c: bool(c.speculative_use_block_verification),
        "acceptance is token by token",
    ),
    (
        "--enable-lora",
        lambda c: bool(c.enable_lora or c.lora_paths),
        "adapters are applied per request to equal numbers of rows, and a verification has unequal",
    ),
    ("--speculative-adaptive", lambda c: bool(c.speculative_adaptive), "gamma is scheduled here"),
    (
        "--speculative-token-map",
        lambda c: c.speculative_token_map is not None,
        "a reduced draft vocabulary is the checkpoint's d2t tensor",
    ),
)


def _refuse_recurrent(target: Any, algorithm: str) -> None:
    """A recurrent state keeps what rejected drafts put into it; only K/V slots are written over."""
    if mambaish_config(target) is not None:
        raise ValueError(
            f"--model-path: expected a model whose layers all attend over K/V slots with "
            f"{algorithm} on this worker, found {target.hf_config.architectures} with recurrent "
            "layers (linear attention or state space). Their state is not rolled back when drafts "
            "are rejected. Serve it without --speculative-algorithm."
        )


def _refuse_unsupported(cfg: Any, algorithm: str) -> None:
    for flag, is_set, why in _UNSUPPORTED:
        if is_set(cfg):
            raise ValueError(
                f"{flag}: expected unset with {algorithm} on this worker, found it set. "
                f"{why[0].upper()}{why[1:]}. Leave it out."
            )


def _refuse_exchanged(cfg: Any, draft: DraftConfig) -> None:
    """The draft's experts are unquantized, and on CUDA SGLang's layers exchange rows for others."""
    on_cuda = str(cfg.device).startswith("cuda")
    if on_cuda and draft.architecture == BUNDLED_V4 and cfg.moe_a2a_backend != "none":
        raise ValueError(
            "--moe-a2a-backend: expected none on CUDA with DeepSeek-V4's own draft on this worker, "
            f"found {cfg.moe_a2a_backend}. The draft's experts are widened at load, and SGLang's "
            "exchange there is for fp8 and fp4. Leave it out, or speculation."
        )
