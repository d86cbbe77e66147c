"""Tiny checkpoints by name, each made once per test run (or once, under SGLANG_EXT_TEST_CACHE)."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.e2e.trained import fit, with_tensors
from tests.oracle.reference_decode import load_target
from tests.oracle.reference_draft import ReferenceDraft
from tests.tiny import HIDDEN, MASK, VOCAB, draft_config, make_draft, make_target

# Strong enough that context matters, weak enough that the last token often decides.
MIXING = 0.35
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
ALL_SLIDING = {
    "layer_types": ["sliding_attention", "sliding_attention"],
    "sliding_window": 9,
    "is_causal": False,
}
REDUCED = {"draft_vocab_size": 200}

# name -> what it changes in the config of a DSPARK draft
DSPARK: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "confidence-of-hidden": {"confidence_head_with_markov": False},
    "no-confidence": {"enable_confidence_head": False, "confidence_head_with_markov": False},
    "reduced-vocabulary": REDUCED,
    "padded-vocabulary": {"vocab_size": 320},
    "own-position": {"sample_from_anchor": False},
    "sliding": SLIDING,
}
DFLASH = ("zlab", "anchor", "sliding", "all-sliding", "dflash2", "reduced-vocabulary")
DFLASH_BLOCK = 9


class Checkpoints:
    """Paths of targets and drafts."""

    def __init__(self) -> None:
        cache = os.environ.get("SGLANG_EXT_TEST_CACHE")
        self.folder = Path(cache or tempfile.mkdtemp(prefix="sglang-ext-tiny-"))
        self._models: dict[Path, Any] = {}

    def _once(self, name: str, make: Callable[[Path], Path]) -> Path:
        path, done = self.folder / name, self.folder / f"{name}.done"
        if not done.exists():
            path.mkdir(parents=True, exist_ok=True)
            make(path)
            done.touch()
        return path

    def target(self, kind: str = "llama", **changes: Any) -> Path:
        mark = "".join(f"-{k}={v}" for k, v in sorted(changes.items()))
        options = {"mixing": MIXING, **changes}
        return self._once(f"target-{kind}{mark}", lambda p: make_target(p, kind, **options))

    def dspark(self, name: str = "vanilla", kind: str = "llama", **more: Any) -> Path:
        options = {"gamma": 8, **DSPARK[name], **more}
        mark = "".join(f"-{k}={v}" for k, v in sorted(more.items()))
        target = self.target(kind)
        return self._once(
            f"dspark-{name}-{kind}{mark}", lambda p: make_draft(p, "DSPARK", target, **options)
        )

    def dflash(self, name: str = "zlab", kind: str = "llama") -> Path:
        return self._once(f"dflash-{name}-{kind}", lambda p: self._make_dflash(p, name, kind))

    def draft(self, algorithm: str, name: str, kind: str = "llama") -> Path:
        return self.dspark(name, kind) if algorithm == "DSPARK" else self.dflash(name, kind)

    def _make_dflash(self, path: Path, name: str, kind: str) -> Path:
        target = self.target(kind)
        if name in ("zlab", "anchor", "reduced-vocabulary"):
            more: dict[str, Any] = REDUCED if name == "reduced-vocabulary" else {}
            if name == "anchor":
                more = self.anchor_config
            make_draft(path, "DFLASH", target, base_scale=1.0, gamma=DFLASH_BLOCK - 1, **more)
            return fit(path, target)
        base = self.dflash("zlab", kind)
        config = draft_config("DFLASH", gamma=DFLASH_BLOCK - 1)
        extra: dict[str, Tensor] = {}
        if name == "dflash2":
            config, extra = _dflash2(config)
        else:
            config |= SLIDING if name == "sliding" else ALL_SLIDING
        return with_tensors(base, path, json.dumps(config), extra)

    @cached_property
    def anchor_config(self) -> dict[str, Any]:
        """DeepSpec's flat keys: the anchor row predicts, block_size counts drafts."""
        return {
            "architectures": ["Qwen3DFlashModel"],
            "dflash_config": None,
            "block_size": DFLASH_BLOCK - 1,
            "mask_token_id": MASK,
            "target_layer_ids": [0, 1, 2],
            "markov_rank": 0,
        }

    def model(self, target: Path) -> Any:
        """The HF model of a target, loaded once."""
        if target not in self._models:
            self._models[target] = load_target(target)
        return self._models[target]

    def reference(self, draft: Path, target: Path) -> ReferenceDraft:
        model = self.model(target)
        return ReferenceDraft.load(
            draft,
            model.get_input_embeddings().weight.detach(),
            model.get_output_embeddings().weight.detach(),
        )


def _dflash2(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """DFlash 2's additions near identity, so that what the base learned still shows."""
    rank, group, taps = 16, 16, 2
    generator = torch.Generator().manual_seed(11)

    def noise(*shape: int, scale: float) -> Tensor:
        return scale * torch.randn(shape, generator=generator)

    config = {**config, "architectures": ["DFlash2DraftModel"]}
    config["dflash_config"] = {
        **config["dflash_config"],
        "conv_kernel_size": taps,
        "conv_group_size": group,
        "selector_rank": rank,
        "selector_top_k": 8,
    }
    extra = {
        "candidate_selector.predecessor_codebook": noise(VOCAB, rank, scale=0.7),
        "candidate_selector.successor_codebook": noise(VOCAB, rank, scale=0.7),
        "candidate_selector.hidden_projection.weight": noise(rank, HIDDEN, scale=0.1),
    }
    for n in range(config["num_hidden_layers"]):
        for name in ("attention_conv", "mlp_conv"):
            base = noise(2, taps, HIDDEN, scale=0.05)
            base[:, 0] += 1.0
            extra[f"layers.{n}.{name}.base_kernel"] = base
            extra[f"layers.{n}.{name}.kernel_projection.weight"] = noise(
                2 * taps * (HIDDEN // group), HIDDEN, scale=0.01
            )
    return config, extra
