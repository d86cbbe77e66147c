"""Models of ours under names of ours (srt/models/claim.py), each with its own token pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.patches.hooks import hook, register_resolution
from sglang_ext.patches.ledger import Kind, Patch, Stage, Where

_CONFIG = "sglang.srt.configs.model_config"
_POOL = "sglang.srt.mem_cache.kv_cache_configurator"
_SIZE = "sglang.srt.model_executor.pool_configurator"
_LOADER = "sglang.srt.model_loader.utils"
_UPSTREAM = "https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt"


def _get_config(original: Callable[..., Any], model: str, *args: Any, **kwargs: Any) -> Any:
    from sglang_ext.plugin import wants_portable_cpu
    from sglang_ext.srt.models.claims import offered

    config = original(model, *args, **kwargs)
    claim = offered(config)
    if claim is None:
        return config
    if not wants_portable_cpu():
        # Our CPU platform applies this stage itself; SGLang's platforms have no such moment.
        from sglang_ext.patches import apply_all

        apply_all(portable_cpu=False, stage=Stage.BACKEND)
    from transformers import PretrainedConfig

    raw, _ = PretrainedConfig.get_config_dict(model, revision=kwargs.get("revision"))
    return claim.claimed(config, {**raw, **(kwargs.get("model_override_args") or {})})


def _build_pool(
    original: Callable[..., Any],
    configurator: Any,
    *,
    max_total_num_tokens: int,
    mha_pool_class: type,
    quant_method: Any = None,
) -> Any:
    from sglang_ext.srt.models.claims import claim_of

    config = configurator.model_config.hf_config
    claim = claim_of(config)
    return original(
        configurator,
        max_total_num_tokens=max_total_num_tokens,
        mha_pool_class=mha_pool_class if claim is None else claim.pool_class(config),
        quant_method=quant_method,
    )


def _cell_size(
    original: Callable[..., int], pool_configurator: Any, kvc: Any, num_layers: int
) -> int:
    from sglang_ext.srt.models.claims import claim_of

    config = kvc.model_config.hf_config
    claim = claim_of(config)
    if claim is None:
        return original(pool_configurator, kvc, num_layers)
    return claim.token_size(claim.read(config), num_layers, kvc.kv_cache_dtype, kvc.page_size)


def _model_class(original: Callable[..., Any], model_config: Any) -> Any:
    from sglang_ext.srt.models.claims import claim_of

    claim = claim_of(model_config.hf_config)
    if claim is not None:
        from sglang.srt.models.registry import ModelRegistry

        ModelRegistry.models[claim.architecture] = claim.model_class
    return original(model_config)


def _handed_width(
    original: Callable[..., Any], hf_config: Any, hidden_size: int, hc_mult: int
) -> Any:
    from sglang_ext.srt.models.claims import claim_of

    claim = claim_of(hf_config)
    if claim is None or claim.handed_width is None:
        return original(hf_config, hidden_size, hc_mult)
    return claim.handed_width(claim.read(hf_config)), None


def _resolve_args(server_args: Any, previous: Callable[[Any], None]) -> None:
    from sglang.srt.arg_groups.overrides import model_config_of

    from sglang_ext.srt.models.claims import claim_of

    config = model_config_of(server_args).hf_config
    claim = claim_of(config)
    if claim is not None:
        claim.resolve(server_args, config)
    previous(server_args)


CONFIG_PATCH = Patch(
    name="claimed-models-name",
    target=f"{_CONFIG}:get_config",
    kind=Kind.AROUND,
    where=Where.ANY,
    why="the official names of DeepSeek-V3.2 and V4 select a backend, pool and K/V format that "
    "need CUDA, and an override of the name in the arguments would reach the draft as well",
    upstream=f"{_UPSTREAM}/configs/model_config.py",
    signature="(model: str, trust_remote_code: bool, revision: Optional[str] = None, "
    "model_override_args: Optional[dict] = None, model_config_parser: str = 'auto', **kwargs)",
    until="SGLang's DeepSeek-V3.2 and V4 ask the platform what it can run",
    apply=lambda: hook(f"{_CONFIG}.get_config", _get_config, Kind.AROUND),
)

WIDTH_PATCH = Patch(
    name="claimed-models-width",
    target=f"{_CONFIG}:resolve_spec_hidden_size",
    kind=Kind.AROUND,
    where=Where.ANY,
    why="a DP rank without requests sends the draft rows as wide as the target's streams, and the "
    "width follows from the official name",
    upstream=f"{_UPSTREAM}/configs/model_config.py",
    signature="(hf_config, hidden_size: int, hc_mult: int) -> tuple[int, typing.Optional[int]]",
    until="a model class states the width of what it hands to a draft",
    apply=lambda: hook(f"{_CONFIG}.resolve_spec_hidden_size", _handed_width, Kind.AROUND),
)

ARGS_PATCH = Patch(
    name="claimed-models-args",
    target="sglang.srt.arg_groups.model_hook:handle_model_specific_adjustments",
    kind=Kind.RESOLUTION,
    where=Where.ANY,
    why="options that a model of this package cannot honour are refused before the start",
    upstream="https://github.com/sgl-project/sglang (official extension point)",
    signature="(server_args: 'Any')",
    until="SGLang's DeepSeek-V3.2 and V4 ask the platform what it can run",
    apply=register_resolution("handle_model_specific_adjustments", _resolve_args),
)

POOL_PATCH = Patch(
    name="claimed-models-pool",
    target=f"{_POOL}:KVCacheConfigurator._build_mha_kv_pool",
    kind=Kind.AROUND,
    where=Where.ANY,
    stage=Stage.BACKEND,
    why="a platform may name a pool class, but is not told which model it is for",
    upstream=f"{_UPSTREAM}/mem_cache/kv_cache_configurator.py",
    signature="(self, *, max_total_num_tokens: 'int', mha_pool_class: 'type', quant_method=None) "
    "-> 'KVCache'",
    until="get_kv_pool_cls is given the model's config",
    apply=lambda: hook(f"{_POOL}.KVCacheConfigurator._build_mha_kv_pool", _build_pool, Kind.AROUND),
)

SIZE_PATCH = Patch(
    name="claimed-models-size",
    target=f"{_SIZE}:DefaultPoolConfigurator._compute_cell_size",
    kind=Kind.AROUND,
    where=Where.ANY,
    stage=Stage.BACKEND,
    why="bytes per token are worked out from heads and head size, not from the pool's class",
    upstream=f"{_UPSTREAM}/model_executor/pool_configurator.py",
    signature="(self, kvc: 'KVCacheConfigurator', num_layers: 'int') -> 'int'",
    until="a pool class states its bytes per token",
    apply=lambda: hook(
        f"{_SIZE}.DefaultPoolConfigurator._compute_cell_size", _cell_size, Kind.AROUND
    ),
)

MODEL_PATCH = Patch(
    name="claimed-models-class",
    target=f"{_LOADER}:get_model_architecture",
    kind=Kind.AROUND,
    where=Where.ANY,
    stage=Stage.BACKEND,
    why="entering a class into the registry at this point would import every model file of "
    "SGLang's while the model runner is half imported",
    upstream=f"{_UPSTREAM}/model_loader/utils.py",
    signature="(model_config: sglang.srt.configs.model_config.ModelConfig) -> "
    "Tuple[Type[torch.nn.modules.module.Module], str]",
    until="the registry takes a class by its import path",
    apply=lambda: hook(f"{_LOADER}.get_model_architecture", _model_class, Kind.AROUND),
)
