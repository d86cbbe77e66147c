"""Who serves DeepSeek-V3.2, and what SGLang is told about it where it is us.

SGLang decides attention backend, pool, page size and K/V format by the architecture's name, and
under the official name all of them need CUDA. Our name is one it knows nothing about, so it takes
its generic path, and the parts it cannot guess (pool, bytes per token) are supplied by hooks.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.arg_groups.overrides import (
    declare_resolution,
    model_config_of,
    resolving_view,
)

from sglang_ext import env
from sglang_ext.srt.models.deepseek_v32_config import OFFICIAL, DeepseekV32Config, parse

ARCHITECTURE = "SglangExtDeepseekV32ForCausalLM"
SOURCE = "sglang_ext.deepseek_v32"
# The fields as they were read. SGLang changes its copy: on a CPU it rounds sizes up to multiples
# of the rank count, and a quantisation entry would make its layers expect fp8 weights.
_FIELDS = "sglang_ext_deepseek_v32"


def is_ours(hf_config: Any) -> bool:
    """Whether a config names the architecture that this package loads."""
    return ARCHITECTURE in (getattr(hf_config, "architectures", None) or ())


def wanted(portable_cpu: bool) -> bool:
    """Whether SGLANG_EXT_MODELS gives DeepSeek-V3.2 to this package on this machine."""
    choice = env.MODELS.get()
    return choice == "always" or (choice == "auto" and portable_cpu)


def read(hf_config: Any) -> DeepseekV32Config:
    """The checkpoint's facts from the config that SGLang hands a model."""
    return parse(getattr(hf_config, _FIELDS))


def claimed(hf_config: Any, folder: str, overrides: dict[str, Any] | None) -> Any:
    """The config under our architecture's name; other configs come back as they are.

    Raises:
        DeepseekV32ConfigError: a field that cannot be served as it stands.
    """
    if OFFICIAL not in (getattr(hf_config, "architectures", None) or ()):
        return hf_config
    ours = copy.deepcopy(hf_config)
    ours.architectures = [ARCHITECTURE]
    setattr(ours, _FIELDS, hf_config.to_dict())
    ours.quantization_config = None
    file = Path(folder) / "config.json"
    if file.is_file():
        # transformers fills in fields that the file leaves out, with values of another model.
        parse(json.loads(file.read_text()) | dict(overrides or {}))
    read(ours)
    return ours


_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "--kv-cache-dtype",
        lambda c: c.kv_cache_dtype not in ("auto", "bfloat16", "bf16"),
        "latents and index keys are kept in the model's dtype",
    ),
    ("--quantization", lambda c: c.quantization is not None, "fp8 weights are widened at load"),
    (
        "--enable-hierarchical-cache",
        lambda c: bool(c.enable_hierarchical_cache),
        "the host cache does not know rows of this shape",
    ),
    (
        "--disaggregation-mode",
        lambda c: c.disaggregation_mode != "null",
        "latents and index keys are not transferred between servers",
    ),
    ("--enable-lora", lambda c: bool(c.enable_lora or c.lora_paths), "adapters are not applied"),
    (
        "--speculative-algorithm",
        lambda c: c.speculative_algorithm not in (None, "DFLASH", "DSPARK"),
        "the checkpoint's own MTP layer is not implemented; DFLASH and DSPARK are",
    ),
    (
        "--enable-two-batch-overlap",
        lambda c: bool(c.enable_two_batch_overlap),
        "the layers are not split into overlapping operations",
    ),
    ("--attn-cp-size", lambda c: (c.attn_cp_size or 1) > 1, "attention runs over whole contexts"),
)


def resolve(server_args: Any) -> None:
    """Refuse what cannot be served exactly, then name the attention backend."""
    if not is_ours(model_config_of(server_args).hf_config):
        return
    cfg = resolving_view(server_args)
    for flag, is_set, why in _REFUSED:
        if is_set(cfg):
            raise ValueError(
                f"{flag}: expected unset with DeepSeek-V3.2 on this package, found it set. "
                f"{why[0].upper()}{why[1:]}. Leave it out."
            )
    for field in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        if getattr(cfg, field) not in (None, "portable"):
            raise ValueError(
                f"--{field.replace('_', '-')}: expected portable with DeepSeek-V3.2 on this "
                f"package, found {getattr(cfg, field)!r}. Leave it out."
            )
    if cfg.attention_backend is None:
        declare_resolution(server_args, SOURCE, attention_backend="portable")
