"""Files with odd values in every place: an answer, or an error that says what to correct."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_ext.launcher import catalog
from sglang_ext.launcher.compose import compose
from sglang_ext.launcher.errors import ConfigError
from sglang_ext.launcher.model_config import MOST_DRAFTS
from sglang_ext.launcher.rules import check
from sglang_ext.planner.draft import read_draft
from sglang_ext.planner.search import Question, search
from sglang_ext.planner.shape import read_shape
from sglang_ext.planner.validate import validate

ODD: list[Any] = [
    None, True, False, 0, 1, -3, 3, 8.5, 10**10, 10**400, float("nan"), float("inf"), -1.0, "", "x",
    "8", [], [1], [-1], [True], ["x"], [None], [[]], {}, {"a": 1}, {"quant_method": []},
    {"target_layer_ids": "x"},
]  # fmt: skip
odd = st.sampled_from(ODD)
MODELS = catalog.names("base")
CHECKED = settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def _local(folder: Path, config: dict[str, Any]) -> catalog.Model:
    (folder / "config.json").write_text(json.dumps(config))
    catalog.model.cache_clear()
    return catalog.model(str(folder))


def _changed(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """With the value at the key, or without the key where there is none."""
    return {k: v for k, v in config.items() if k != key} | ({} if value is ... else {key: value})


@pytest.mark.parametrize("name", MODELS)
def test_any_value_of_a_config_is_read_or_refused(name: str, tmp_path: Path) -> None:
    """Every key of the model and of its drafts, every odd value."""
    model = catalog.model(name)
    shape = read_shape(model.config)
    for key in [*model.config, "dtype", "num_experts", "dspark_target_layer_ids"]:
        for value in (*ODD, ...):
            with suppress(ConfigError):
                changed = _local(tmp_path, _changed(model.config, key, value))
                sizes = read_shape(changed.config)
                assert 0 < sizes.params < 1e300
                for draft in changed.drafts.values():
                    assert read_draft(draft, changed.config, sizes).row_params > 0
                    assert 1 <= draft.gamma <= MOST_DRAFTS
    for draft in model.drafts.values():
        for key in draft.config:
            for value in (*ODD, ...):
                changed_draft = replace(draft, config=_changed(draft.config, key, value))
                with suppress(ConfigError):
                    assert read_draft(changed_draft, model.config, shape).row_params > 0


@CHECKED
@given(st.sampled_from(MODELS), st.data())
def test_an_odd_config_is_planned_and_launched_or_refused(
    tmp_path: Path, name: str, data: st.DataObject
) -> None:
    config = copy.deepcopy(catalog.model(name).config)
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=2)):
        config = _changed(config, key, data.draw(odd | st.just(...)))
    with suppress(ConfigError):
        model, machine = _local(tmp_path, config), catalog.hardware("4xh200")
        preset = catalog.Preset("p", model.name, machine.name, "balanced", ("tp4",))
        check(compose(preset, model=model))
        assert search(Question(model, machine, catalog.Load(256, 64, 4))).ranked


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_key_value_heads": 8.5}, "num_key_value_heads"),
        ({"num_key_value_heads": 5}, "divisor of the 32 heads"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_experts": 64, "num_experts_per_tok": 8}, "moe_intermediate_size"),
        ({"num_experts": 64, "num_experts_per_tok": 0}, "num_experts_per_tok"),
        ({"architectures": "Qwen3ForCausalLM"}, "a list of names"),
        ({"quantization_config": "fp8"}, "a mapping"),
        ({"dspark_target_layer_ids": [1]}, "dspark_markov_rank"),
        ({"dspark_block_size": 10**6}, "dspark_block_size"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    def planned() -> None:
        model = _local(tmp_path, {**catalog.model("qwen3-8b").config, **changes})
        search(Question(model, catalog.hardware("1xh100"), catalog.Load(64, 64, 1)))

    with pytest.raises(ConfigError, match=said):
        planned()


def test_both_keys_of_the_dtype_are_read() -> None:
    config = {k: v for k, v in catalog.model("qwen3-8b").config.items() if k != "torch_dtype"}
    assert read_shape({**config, "dtype": "float32"}).linear == 4.0
    assert read_shape({**config, "torch_dtype": "float32"}).linear == 4.0
    assert read_shape(config).linear == 2.0


def _paths(found: Any, so_far: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document, itself left out."""
    if not isinstance(found, dict | list):
        return []
    keys = list(found) if isinstance(found, dict) else range(len(found))
    below = [path for key in keys for path in _paths(found[key], (*so_far, key))]
    return [(*so_far, key) for key in keys] + below


def _altered(found: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with the value at the path, or without what is there."""
    found = copy.deepcopy(found)
    at = found
    for key in path[:-1]:
        at = at[key]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return found


POINT = {
    "algorithm": "DSPARK", "draft": "d", "gamma": 3, "dataset": "code", "file": None,
    "concurrency": 2, "input_tokens": 50, "output_tokens_per_second": 20.0, "median_tpot_ms": 50.0,
    "median_ttft_ms": 5.0, "acceptance_length": 2.0,
}  # fmt: skip
BENCH: dict[str, Any] = {
    "launch_arguments": ["--model-path", "x", "--tp-size", "1", "--ep-size", "1"],
    "load": {"output_tokens": 64},
    "points": {"a": POINT, "b": {**POINT, "algorithm": "none", "gamma": None}},
}
ROW: dict[str, Any] = {
    "model": "qwen3-30b-a3b", "hardware": "8xh100", "throughput": 100.0, "tpot_ms": 5, "source": "",
    "layout": {"replicas": 1, "tp": 8, "dp": 1, "cp": 1, "ep": 8, "a2a": "none", "tbo": False,
               "redundant": 0, "sbo": False, "pp": 1},
    "load": {"input_tokens": 100, "output_tokens": 100, "concurrency": 4},
}  # fmt: skip
DRAFTED = {
    **ROW,
    "model": "qwen3-8b",
    "layout": {"replicas": 1, "tp": 8, "algorithm": "dspark", "gamma": 2},
    "conditional": [0.5, 0.4],
}


def _validated(file: Path, found: Any, names: tuple[str, ...]) -> None:
    file.write_text(json.dumps(found))
    with suppress(ConfigError):
        assert validate(file, *names).regions


@pytest.mark.parametrize(
    ("found", "names"),
    [(BENCH, ("demo", "cpu")), (ROW, ()), (DRAFTED, ())],
    ids=["bench", "row", "drafted"],
)
def test_any_value_of_a_bench_file_is_compared_or_refused(
    found: dict[str, Any], names: tuple[str, ...], tmp_path: Path
) -> None:
    for path in _paths(found):
        for value in (*ODD, ...):
            _validated(tmp_path / "v.json", _altered(found, path, value), names)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@CHECKED
@given(st.sampled_from([(BENCH, ("demo", "cpu")), (DRAFTED, ())]), st.data())
def test_odd_documents_are_compared_or_refused(
    tmp_path: Path, case: tuple[dict[str, Any], tuple[str, ...]], data: st.DataObject
) -> None:
    found, names = case
    for _ in range(2):
        path = data.draw(st.sampled_from(_paths(found)))
        found = _altered(found, path, data.draw(json_values))
    _validated(tmp_path / "v.json", found, names)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"acceptance_length": 99}, "acceptance_length: expected 1 to 4, of 3 drafts"),
        ({"acceptance_length": True}, "acceptance_length"),
        ({"gamma": 10**9}, f"gamma: expected a whole number of at most {MOST_DRAFTS}"),
        ({"concurrency": 10**400}, "concurrency"),
        ({"output_tokens_per_second": 10**400}, "output_tokens_per_second"),
    ],
)
def test_a_wrong_point_is_named(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = tmp_path / "v.json"
    file.write_text(json.dumps({**BENCH, "points": {"a": {**POINT, **changes}}}))
    with pytest.raises(ConfigError, match=said):
        validate(file, "demo", "cpu")


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"tp": 3}, "32 attention heads do not split over 3 ranks"),
        ({"tp": 8, "ep": 8}, "no experts to spread"),
        ({"tp": 8, "dp": 8, "ep": 8, "a2a": "deepep"}, "no experts to dispatch to"),
    ],
)
def test_a_layout_that_the_model_cannot_have_is_refused(
    sizes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    file = tmp_path / "v.jsonl"
    file.write_text(json.dumps({**ROW, "model": "qwen3-8b", "layout": {"replicas": 1, **sizes}}))
    with pytest.raises(ConfigError, match=said):
        validate(file)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
def test_a_file_that_is_too_deep_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="expected"):
        catalog.model(str(tmp_path))
    with pytest.raises(ConfigError, match="expected"):
        validate(tmp_path / "config.json")
