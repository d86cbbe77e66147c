"""Whatever a field of config.json holds: it is read, or an error names it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from sglang_ext.srt.models import deepseek_v4_config, deepseek_v32_config
from sglang_ext.srt.models.strict_config import ConfigFieldError
from sglang_ext.tiny_model import deepseek_v4, deepseek_v32

YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
V4 = deepseek_v4.tiny_config(4, with_dspark=True) | FP8
# As transformers spells it.
NESTED = {
    "layer_types": list(deepseek_v4_config.LAYER_TYPES.values()),
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 10000.0},
        "compress": {"rope_theta": 160000.0, "attention_factor": 1.0, **YARN},
    },
    "partial_rotary_factor": 0.25,
}
CONFIGS: dict[str, tuple[Callable[[Mapping[str, Any]], object], dict[str, Any]]] = {
    "V4": (deepseek_v4_config.parse, V4 | {"rope_scaling": YARN}),
    "V4 of transformers": (
        deepseek_v4_config.parse,
        deepseek_v4.tiny_config(3, compress_ratios=[0, 4, 128]) | NESTED,
    ),
    "V3.2": (deepseek_v32_config.parse, deepseek_v32.tiny_config() | FP8 | {"rope_scaling": YARN}),
}
VALUES = ("x", -1, 0.5, [], {}, [None], {"a": 1}, float("inf"), [0, "x"], [[]])


def _places(fields: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = fields if isinstance(fields, dict) else range(len(fields))
    for key in keys:
        yield (*above, key)
        if isinstance(fields[key], dict | list):
            yield from _places(fields[key], (*above, key))


@pytest.mark.parametrize("name", CONFIGS)
def test_any_value_is_read_or_named(name: str) -> None:
    parse, raw = CONFIGS[name]
    parse(raw)
    for *above, key in _places(raw):
        for value in VALUES:
            changed = copy.deepcopy(raw)
            inner: Any = changed
            for step in above:
                inner = inner[step]
            inner[key] = value
            try:
                parse(changed)
            except ConfigFieldError:
                pass
            except Exception as error:
                pytest.fail(f"{(*above, key)} = {value!r}: {error!r}")
