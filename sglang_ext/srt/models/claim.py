"""How a model file of ours takes an official architecture over from SGLang's.

SGLang decides attention backend, pool, page size and K/V format by the architecture's name, and
for some names all of them need CUDA. Under a name of ours, which it knows nothing about, it takes
its generic path, and the parts it cannot guess (pool, bytes per token, attention backend) are
supplied by hooks (patches/claimed_models.py). A `Claim` says everything about one such model.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

from sglang_ext import env
from sglang_ext.srt.models import cuda_graphs
from sglang_ext.srt.models.weight_files import check_whole
from sglang_ext.srt.spec.policy import ALGORITHMS

# Flag, whether it is set, and why it cannot be served.
Refusal = tuple[str, Callable[[Any], bool], str]
# facts, layers, dtype and page size -> bytes
TokenSize = Callable[[Any, int, torch.dtype, int], int]
_BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
# Formats that hand the files' own tensors to the model; others have names of their own.
_PUBLISHED_NAMES = ("auto", "safetensors", "fastsafetensors", "instanttensor", "layered")


@dataclass(frozen=True)
class Claim:
    """One model that this package serves instead of SGLang.

    title: what messages call it. official: the architecture name of its checkpoints.
    parse: config.json's fields -> facts, or an error that names the field.
    fields: what to keep for `read`, out of the config as SGLang built it and config.json itself.
    adjust: what SGLang's generic path must find in the config beside the name.
    refused: flags that cannot be honoured.
    model, backend: `module:class`. pool: `module:function` of the facts.
    token_size: bytes of one token in the pool.
    check: `module:function` that holds tensors without values to the facts.
    prepare: further arguments that the model decides, once nothing is refused.
    handed_width: of what a target hands to its checkpoint's own module, by the facts; None where
        that is a hidden state.
    """

    title: str
    official: str
    parse: Callable[[Mapping[str, Any]], Any]
    fields: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]
    adjust: Callable[[Any, Any], None]
    refused: tuple[Refusal, ...]
    model: str
    backend: str
    pool: str
    token_size: TokenSize
    check: str
    prepare: Callable[[Any], None] = lambda _server_args: None
    handed_width: Callable[[Any], int] | None = None

    @property
    def architecture(self) -> str:
        return f"SglangExt{self.official}"

    @property
    def _kept(self) -> str:
        # SGLang changes its own copy: it rounds sizes up to multiples of the rank count, spells
        # the rotation differently, and would build quantised layers for a quantisation entry.
        return f"sglang_ext_{self.official}"

    def offers(self, hf_config: Any) -> bool:
        """Whether a config is that of an official checkpoint."""
        return self.official in _names(hf_config)

    def holds(self, hf_config: Any) -> bool:
        """Whether a config names the architecture that this package loads."""
        return self.architecture in _names(hf_config)

    def read(self, hf_config: Any) -> Any:
        """The checkpoint's facts from a config that `claimed` returned."""
        return self.parse(getattr(hf_config, self._kept))

    def claimed(self, hf_config: Any, raw: Mapping[str, Any]) -> Any:
        """The config under our architecture's name.

        raw: config.json as the file has it, overrides from the arguments included. It is read by
        itself, because transformers fills in fields that a file leaves out with another model's.

        Raises:
            ValueError: a field that cannot be served as it stands.
        """
        self.parse(raw)
        ours = copy.deepcopy(hf_config)
        ours.architectures = [self.architecture]
        setattr(ours, self._kept, dict(self.fields(hf_config, raw)))
        ours.quantization_config = None
        self.adjust(ours, self.read(ours))
        return ours

    def resolve(self, server_args: Any, hf_config: Any) -> None:
        """Refuse what cannot be served exactly, then decide attention backend and graphs.

        hf_config: of the target, as `claimed` returned it.

        Raises:
            ValueError: a flag that cannot be honoured, weight files that are not whole, or tensors
                that are not those of the config.
        """
        cfg = resolving_view(server_args)
        for flag, is_set, why in self.refused:
            if is_set(cfg):
                raise ValueError(
                    f"{flag}: expected unset with {self.title} on this package, found it set. "
                    f"{why[0].upper()}{why[1:]}. Leave it out."
                )
        if cfg.speculative_algorithm in ALGORITHMS and env.SPEC.get() == "never":
            raise ValueError(
                f"SGLANG_EXT_SPEC: expected auto or always with {self.title} on this package, "
                "found never. SGLang's worker does not know its pools. Unset it, or serve without "
                "--speculative-algorithm."
            )
        for field in _BACKENDS:
            if getattr(cfg, field) not in (None, "portable"):
                raise ValueError(
                    f"--{field.replace('_', '-')}: expected portable with {self.title} on this "
                    f"package, found {getattr(cfg, field)!r}. Leave it out."
                )
        source = f"sglang_ext.{self.official}"
        if cfg.attention_backend is None:
            declare_resolution(server_args, source, attention_backend="portable")
        cuda_graphs.switch_off(server_args, self.title, source)
        if cfg.load_format != "dummy":
            found = check_whole(Path(cfg.model_path))
            if found and cfg.load_format in _PUBLISHED_NAMES:
                _imported(self.check)(self.read(hf_config), found)
        self.prepare(server_args)

    @property
    def model_class(self) -> Any:
        return _imported(self.model)

    @property
    def backend_class(self) -> Any:
        return _imported(self.backend)

    def pool_class(self, hf_config: Any) -> type:
        """The token pool of this checkpoint."""
        made: type = _imported(self.pool)(self.read(hf_config))
        return made


def not_served(
    state: str,
    speculation: str,
    quantisation: str,
    algorithms: tuple[str, ...] = ("DFLASH", "DSPARK"),
) -> tuple[Refusal, ...]:
    """What no claimed model serves.

    state: what its pool keeps beside latents. algorithms: how it drafts; speculation: why only so.
    """
    return (
        (
            "--kv-cache-dtype",
            lambda c: c.kv_cache_dtype not in ("auto", "bfloat16", "bf16"),
            f"latents and {state} are kept in the model's dtype",
        ),
        ("--quantization", lambda c: c.quantization is not None, quantisation),
        (
            "--enable-hierarchical-cache",
            lambda c: bool(c.enable_hierarchical_cache),
            "the host cache does not know rows of this shape",
        ),
        (
            "--disaggregation-mode",
            lambda c: c.disaggregation_mode != "null",
            f"latents and {state} are not transferred between servers",
        ),
        (
            "--enable-lora",
            lambda c: bool(c.enable_lora or c.lora_paths),
            "adapters are not applied",
        ),
        (
            "--speculative-algorithm",
            lambda c: c.speculative_algorithm not in (None, *algorithms),
            speculation,
        ),
        (
            "--enable-two-batch-overlap",
            lambda c: bool(c.enable_two_batch_overlap) and c.device != "cpu",
            "the halves are set up for the exchange of a CPU",
        ),
        (
            "--enable-two-batch-overlap with SGLANG_EXT_INDEX_SHARE",
            lambda c: bool(c.enable_two_batch_overlap) and env.INDEX_SHARE.get() > 1,
            "halves that reuse a selection have not been held to one batch",
        ),
        (
            "--enable-single-batch-overlap",
            lambda c: bool(c.enable_single_batch_overlap) and c.device != "cpu",
            "its order is set up for the exchange of a CPU",
        ),
        (
            "--moe-a2a-backend",
            lambda c: c.moe_a2a_backend not in (None, "none") and c.device != "cpu",
            "its experts are widened at load, SGLang's exchange on a GPU is for fp8 and fp4",
        ),
        (
            "--moe-runner-backend",
            lambda c: c.moe_runner_backend not in ("auto", "triton"),
            "other runners have not been held to this model's experts",
        ),
    )


def _names(hf_config: Any) -> Any:
    return getattr(hf_config, "architectures", None) or ()


def _imported(path: str) -> Any:
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)
