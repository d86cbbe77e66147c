"""--speculative-algorithm NEXTN on DeepSeek-V4: what it needs, what is decided, what is refused.

The module is part of the target's checkpoint. SGLang builds a draft from a folder with a config of
its own, so it is given a view of the module and never asked for a draft path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

from sglang_ext.core.spec.draft_fields import read_config
from sglang_ext.srt.models.deepseek_v4_config import (
    OFFICIAL_MODULE,
    DeepseekV4Config,
    DeepseekV4ConfigError,
    parse,
)
from sglang_ext.srt.models.deepseek_v4_names import mtp_tensors
from sglang_ext.srt.spec.bundled import Part, view_of
from sglang_ext.srt.spec.checkpoint import local_folder

# To SGLang the first is another name of the second.
ALGORITHMS = ("NEXTN", "EAGLE")
# What SGLang takes for DeepSeek's modules.
STEPS = 3


def parse_module(raw: Mapping[str, Any]) -> DeepseekV4Config:
    """The module as a model of one window layer, from the target's config.json.

    Raises:
        DeepseekV4ConfigError: a checkpoint without a module.
    """
    config = parse(raw)
    if config.dspark is not None:
        raise DeepseekV4ConfigError(
            "dspark_block_size",
            expected="nothing with --speculative-algorithm NEXTN",
            found=config.dspark.block_size,
            remedy="mtp.* is a DSpark draft there; use --speculative-algorithm DSPARK.",
        )
    if config.num_nextn_predict_layers != 1:
        raise DeepseekV4ConfigError(
            "num_nextn_predict_layers",
            expected="1 with --speculative-algorithm NEXTN",
            found=config.num_nextn_predict_layers,
            remedy="Serve the checkpoint without NEXTN.",
        )
    return replace(config, num_hidden_layers=1, compress_ratios=(0,), num_hash_layers=0)


def resolve_nextn(server_args: Any) -> None:
    """Name the draft and the length of its chains; nothing where NEXTN is not asked for.

    Raises:
        ValueError: a checkpoint without a module, its tensors, or lengths that do not fit.
    """
    cfg = resolving_view(server_args)
    if not _asked(cfg):
        return
    steps = _steps(cfg.speculative_num_steps, cfg.speculative_num_draft_tokens)
    declare_resolution(
        server_args,
        "sglang_ext.nextn",
        speculative_draft_model_path=str(module_view(local_folder(cfg.model_path))),
        speculative_num_steps=steps,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=steps + 1,
    )


def module_view(target: Path) -> Path:
    """The folder that shows the module inside checkpoint `target`.

    Raises:
        DeepseekV4ConfigError, DraftConfigError: no module, or tensors of it that do not fit.
    """
    raw = read_config(target)
    config = parse_module(raw)
    part = Part("the MTP module", "num_nextn_predict_layers", config, mtp_tensors(config))
    return view_of(target, part, {**raw, "architectures": [OFFICIAL_MODULE]})


def _steps(steps: int | None, rows: int | None) -> int:
    """Drafted tokens a round; a verification has one row more."""
    asked = {
        "--speculative-num-steps": steps,
        "--speculative-num-draft-tokens": None if rows is None else rows - 1,
    }
    given = {flag: count for flag, count in asked.items() if count is not None}
    if len(set(given.values())) > 1 or any(count < 1 for count in given.values()):
        raise ValueError(
            f"{' and '.join(given)}: expected n and n + 1 with n at least 1, found {steps} and "
            f"{rows}. Give one of them."
        )
    return next(iter(given.values()), STEPS)


def _asked(cfg: Any) -> bool:
    return cfg.speculative_algorithm in ALGORITHMS


def _with_nextn(is_set: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda cfg: _asked(cfg) and is_set(cfg)


REFUSED = tuple(
    (flag, _with_nextn(is_set), why)
    for flag, is_set, why in (
        (
            "--speculative-algorithm",
            lambda c: c.device != "cpu",
            "NEXTN is set up for a CPU only; DSPARK and DFLASH run on every device",
        ),
        (
            "--speculative-draft-model-path",
            lambda c: c.speculative_draft_model_path not in (None, c.model_path),
            "NEXTN drafts with the module in the target's checkpoint",
        ),
        (
            "--revision",
            lambda c: c.revision is not None and not Path(c.model_path).is_dir(),
            "the module would come from another revision; give the checkpoint's folder instead",
        ),
        (
            "--speculative-eagle-topk",
            lambda c: c.speculative_eagle_topk not in (None, 1),
            "branches share positions, and a compressed entry is made of one row per position",
        ),
        (
            "--speculative-draft-attention-backend",
            lambda c: c.speculative_draft_attention_backend not in (None, "portable"),
            "the module reads the target's kind of pool",
        ),
        (
            "--speculative-draft-model-quantization",
            lambda c: c.speculative_draft_model_quantization is not None,
            "weights are widened at load",
        ),
        (
            "--speculative-draft-kv-cache-dtype",
            lambda c: c.speculative_draft_kv_cache_dtype not in (None, "auto"),
            "latents are kept in the model's dtype",
        ),
        (
            "--speculative-draft-window-size",
            lambda c: c.speculative_draft_window_size is not None,
            "the module's window is sliding_window in config.json",
        ),
        (
            "--speculative-token-map",
            lambda c: c.speculative_token_map is not None,
            "the module speaks the whole vocabulary",
        ),
        (
            "--speculative-adaptive",
            lambda c: bool(c.speculative_adaptive),
            "the number of steps is fixed at the start",
        ),
        (
            "--enable-multi-layer-eagle",
            lambda c: bool(c.enable_multi_layer_eagle),
            "there is one module",
        ),
        (
            "--speculative-use-rejection-sampling",
            lambda c: bool(c.speculative_use_rejection_sampling),
            "drafts are the module's most likely tokens, and every sampling parameter is applied "
            "to the target's logits",
        ),
        (
            "--enable-return-hidden-states",
            lambda c: bool(c.enable_return_hidden_states),
            "the target hands its streams to the module in their place",
        ),
        (
            "--speculative-moe-a2a-backend",
            lambda c: c.speculative_moe_a2a_backend not in (None, c.moe_a2a_backend),
            "the module's experts are reached as the target's are",
        ),
    )
)
