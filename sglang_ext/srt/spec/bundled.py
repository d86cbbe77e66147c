"""The draft that a DeepSeek-V4 checkpoint carries, shown to SGLang as a draft of its own.

Official checkpoints keep the draft among the target's files (mtp.0, mtp.1, ...) and describe it by
fields of the target's config.json: `dspark_*` for a DSpark draft, else `num_nextn_predict_layers`
for an MTP module. SGLang builds a draft from a folder with a config of its own, so such a folder
is made: a config.json, and links to those weight files that hold draft tensors. Nothing is copied.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from sglang_ext import env
from sglang_ext.core.safetensors_header import Shape, read_header
from sglang_ext.core.spec.draft_config import BUNDLED_V4
from sglang_ext.core.spec.draft_fields import DraftConfigError, read_config
from sglang_ext.srt.models.deepseek_v4_config import OFFICIAL, DeepseekV4Config, parse
from sglang_ext.srt.models.deepseek_v4_names import (
    SCALE,
    TARGET_NAMES,
    canonical,
    dspark_tensors,
    is_draft,
)
from sglang_ext.srt.models.weight_files import check_whole

TARGET_CONFIG = "sglang_ext_target_config"


def carries_draft(raw: dict[str, Any]) -> bool:
    """Whether a target's config.json describes a bundled DSpark draft."""
    return OFFICIAL in (raw.get("architectures") or ()) and "dspark_block_size" in raw


@dataclass(frozen=True)
class Part:
    """A draft inside a checkpoint.

    title: what messages call it. field: of config.json, which says that it is there.
    config: the checkpoint's facts. tensors: all of the draft's, by published name.
    """

    title: str
    field: str
    config: DeepseekV4Config
    tensors: dict[str, Shape]


def draft_view(target: Path) -> Path:
    """The folder that shows the DSpark draft inside checkpoint `target`.

    Raises:
        DeepseekV4ConfigError, DraftConfigError: fields or tensors of the draft that do not fit.
    """
    raw = read_config(target)
    config = parse(raw)
    part = Part("the bundled draft", "dspark_block_size", config, dspark_tensors(config))
    return view_of(target, part, draft_fields(raw, config))


def view_of(target: Path, part: Part, fields: dict[str, Any]) -> Path:
    """A folder with `fields` as config.json and the files that hold `part`; made on every call.

    Raises:
        DraftConfigError: tensors that do not fit.
        DeepseekV4TensorError: scales that do not.
    """
    # Imported late: it brings SGLang's loader with it.
    from sglang_ext.srt.models.deepseek_v4_load import check_part

    files = _files_with(target, part)
    check_part(part.config, check_whole(target), part.tensors, passed=TARGET_NAMES)
    key = hashlib.sha256(f"{target.resolve()}".encode()).hexdigest()[:16]
    view = env.CACHE_DIR.get() / "bundled" / key
    view.mkdir(parents=True, exist_ok=True)
    for old in view.iterdir():
        # Dotted names are another process's, about to be renamed.
        if old.name not in files and old.name != "config.json" and not old.name.startswith("."):
            old.unlink(missing_ok=True)
    for name in files:
        _link(target / name, view / name)
    _replace(view / "config.json", json.dumps(fields, indent=1))
    return view


def draft_fields(raw: dict[str, Any], config: DeepseekV4Config) -> dict[str, Any]:
    """config.json of the view. model_type only makes the file readable for transformers."""
    dspark = config.dspark
    assert dspark is not None
    return {
        "architectures": [BUNDLED_V4],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": dspark.stages,
        "num_target_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": 1,
        "head_dim": config.head_dim,
        "intermediate_size": config.moe_intermediate_size,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
        "block_size": dspark.block_size,
        "mask_token_id": dspark.noise_token_id,
        "target_layer_ids": list(dspark.target_layer_ids),
        "markov_rank": dspark.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "torch_dtype": raw.get("torch_dtype") or raw.get("dtype") or "bfloat16",
        TARGET_CONFIG: raw,
    }


def _files_with(target: Path, part: Part) -> list[str]:
    """Weight files that hold draft tensors, all of which must be there in the right shape."""
    files: set[str] = set()
    seen: set[str] = set()
    for file in sorted(target.glob("*.safetensors")):
        for given, shape in read_header(file, DraftConfigError).items():
            name = canonical(given)
            if is_draft(name) and not name.endswith(SCALE):
                _check_shape(name, part, shape)
                seen.add(name)
                files.add(file.name)
    missing = sorted(set(part.tensors) - seen)
    if missing:
        raise DraftConfigError(
            missing[0],
            expected=f"a tensor of {part.title}, as {part.field} in config.json says",
            found=f"none ({len(missing)} missing)",
            remedy="Download the checkpoint again, or serve it without speculation.",
        )
    return sorted(files)


def _check_shape(name: str, part: Part, shape: Shape) -> None:
    wanted = part.tensors.get(name)
    if wanted is None:
        raise DraftConfigError(
            name,
            expected=f"a tensor of {part.title}",
            found="an unknown name",
            remedy="The checkpoint is of a variant that is not implemented.",
        )
    *rows, columns = wanted
    # Two fp4 values share a byte.
    if shape not in (wanted, (*rows, columns // 2)):
        raise DraftConfigError(
            name,
            expected=f"shape {list(wanted)}",
            found=list(shape),
            remedy="Compare config.json and the weight files; they must be of one checkpoint.",
        )


def _link(source: Path, at: Path) -> None:
    scratch = at.with_name(f".{at.name}.{uuid4().hex}")
    scratch.symlink_to(source.resolve())
    os.replace(scratch, at)


def _replace(file: Path, text: str) -> None:
    scratch = file.with_name(f".{file.name}.{uuid4().hex}")
    scratch.write_text(text)
    os.replace(scratch, file)
