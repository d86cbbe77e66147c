"""Targets whose tensors are not those of their config.json: known before a start, and at load."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sglang_ext.srt.models.claims import CLAIMS
from sglang_ext.srt.models.strict_weights import CheckpointTensorError
from sglang_ext.tiny_model import deepseek_v4, deepseek_v32
from tests.tiny import save_tokenizer

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], object]


def _swap(of: Tensors, name: str, value: Tensor) -> None:
    assert name in of
    of[name] = value


V4, V32 = "layers.2.attn.", "model.layers.2.self_attn."
# model, what is stored as fp8, what is done to the tensors, what the message says
FAULTS: dict[str, tuple[str, bool, Change, str]] = {
    "v4 missing": (
        "v4", False, lambda t: t.pop(f"{V4}indexer.wq_b.weight"),
        r"layers\.2\.attn\.indexer\.wq_b\.weight: expected a tensor, found none",
    ),
    "v4 two missing": (
        "v4", False, lambda t: (t.pop("head.weight"), t.pop("layers.0.ffn.gate.tid2eid")),
        r"head\.weight and 1 more: expected a tensor, found none",
    ),
    "v4 surplus": (
        "v4", False, lambda t: t.update({f"{V4}extra.weight": torch.zeros(2, 2)}),
        r"layers\.2\.attn\.extra\.weight: expected a tensor of this architecture, found an unknown",
    ),
    "v4 a layer too many": (
        "v4", False, lambda t: t.update({"layers.4.attn_norm.weight": torch.zeros(64)}),
        r"layers\.4\.attn_norm\.weight: expected a tensor of this architecture",
    ),
    "v4 twice": (
        "v4", False, lambda t: t.update({"lm_head.weight": t["head.weight"].clone()}),
        r"(lm_)?head\.weight: expected one tensor of this name, found another",
    ),
    "v4 misshaped": (
        "v4", False, lambda t: _swap(t, f"{V4}wkv.weight", torch.zeros(31, 64)),
        r"layers\.2\.attn\.wkv\.weight: expected shape \[32, 64\], found \[31, 64\]",
    ),
    "v4 fp8 without a scale": (
        "v4", True, lambda t: t.pop(f"{V4}wkv.scale"),
        r"layers\.2\.attn\.wkv\.weight: expected a \.scale tensor beside it, found none",
    ),
    "v4 a scale of another shape": (
        "v4", True, lambda t: _swap(t, f"{V4}wkv.scale", torch.zeros(2, 1, dtype=torch.uint8)),
        r"layers\.2\.attn\.wkv\.weight \(scale\): expected shape \[1, 1\], found \[2, 1\]",
    ),
    "v3.2 missing": (
        "v32", False, lambda t: t.pop(f"{V32}indexer.k_norm.bias"),
        r"layers\.2\.self_attn\.indexer\.k_norm\.bias: expected a tensor, found none",
    ),
    "v3.2 surplus": (
        "v32", False, lambda t: t.update({f"{V32}extra.weight": torch.zeros(2, 2)}),
        r"layers\.2\.self_attn\.extra\.weight: expected a tensor of this architecture, found an un",
    ),
    "v3.2 misshaped": (
        "v32", False, lambda t: _swap(t, f"{V32}o_proj.weight", torch.zeros(64, 65)),
        r"layers\.2\.self_attn\.o_proj\.weight: expected shape \[64, 64\], found \[64, 65\]",
    ),
    "v3.2 fp8 without a scale": (
        "v32", True, lambda t: t.pop(f"{V32}o_proj.weight_scale_inv"),
        r"layers\.2\.self_attn\.o_proj\.weight: expected a _scale_inv tensor beside it, found none",
    ),
    "v3.2 a scale of another shape": (
        "v32", True, lambda t: _swap(t, f"{V32}o_proj.weight_scale_inv", torch.zeros(2, 1)),
        r"self_attn\.o_proj\.weight_scale_inv: expected shape \[4, 4\], found \[2, 1\]",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Path]:
    """A whole checkpoint of a model, as stored in fp8 or not."""
    made: dict[tuple[str, bool], Path] = {}

    def get(model: str, fp8: bool) -> Path:
        if (model, fp8) not in made:
            folder = tmp_path_factory.mktemp(model) / "target"
            if model == "v4":
                deepseek_v4.write(folder, layers=4, quant="fp8" if fp8 else "none")
            else:
                deepseek_v32.write(folder, fp8_block=(16, 16) if fp8 else None)
                save_tokenizer(folder)
            made[model, fp8] = folder
        return made[model, fp8]

    return get


def _resolve(target: Path, *flags: str) -> None:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    given = ["--model-path", str(target), "--dtype", "float32", *flags]
    prepare_server_args(given).resolve_once()


def _loader(model: str) -> Any:
    return importlib.import_module(f"sglang_ext.srt.models.deepseek_{model}_load")


class Anything(nn.Module):
    """Has a parameter under every name that a checkpoint's tensors are placed at."""

    def __init__(self, places: list[str]) -> None:
        super().__init__()
        self.places = places

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return ((place, nn.Parameter(torch.zeros(()))) for place in self.places)


def _load(model: str, folder: Path, tensors: Tensors, *, partial: bool = False) -> list[str]:
    """Names of the parameters that `load` fills from `tensors`."""
    loader = _loader(model)
    claim = next(c for c in CLAIMS if c.check == f"{loader.__name__}:check")
    facts = claim.parse(json.loads((folder / "config.json").read_text()))
    names = importlib.import_module(f"sglang_ext.srt.models.deepseek_{model}_names")
    wanted = names.required_tensors(facts)
    module = Anything([names.placement(name).parameter for name in wanted])
    more: dict[str, Any] = {"wanted": wanted} if model == "v4" else {"keep": lambda _: True}
    put: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "put", lambda _parameter, place, _tensor: put.append(place.parameter))
        loader.load(module, facts, tensors.items(), partial=partial, **more)
    return put


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_tensors_are_named(
    written: Callable[[str, bool], Path], tmp_path: Path, fault: str
) -> None:
    """In the headers, before anything is started, and once more while they are loaded."""
    model, fp8, change, message = FAULTS[fault]
    whole = written(model, fp8)
    tensors = load_file(whole / "model.safetensors")
    assert _load(model, whole, tensors)
    change(tensors)
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointTensorError, match=message) as raised:
        _resolve(tmp_path)
    assert "checkpoint, " in str(raised.value)
    assert "Compare config.json and the weight files" in str(raised.value)
    with pytest.raises(CheckpointTensorError, match=message):
        _load(model, whole, tensors)


@pytest.mark.parametrize("model", ["v4", "v32"])
def test_a_name_in_two_files_is_named(
    written: Callable[[str, bool], Path], tmp_path: Path, model: str
) -> None:
    whole = written(model, False)
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    name, value = next(iter(load_file(whole / "model.safetensors").items()))
    save_file({name: value.clone()}, tmp_path / "more.safetensors")
    with pytest.raises(CheckpointTensorError, match=f"{name}: expected one tensor of this name"):
        _resolve(tmp_path)


@pytest.mark.parametrize("model", ["v4", "v32"])
def test_a_part_replaces_weights_of_a_loaded_model(
    written: Callable[[str, bool], Path], model: str
) -> None:
    whole = written(model, False)
    tensors = load_file(whole / "model.safetensors")
    name = next(n for n in tensors if n.endswith("head.weight"))
    assert _load(model, whole, {name: tensors[name]}, partial=True) == ["lm_head.weight"]


@pytest.mark.parametrize("model", ["v4", "v32"])
def test_formats_with_names_of_their_own_are_left_to_their_loader(
    written: Callable[[str, bool], Path], tmp_path: Path, model: str
) -> None:
    whole = written(model, False)
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    save_file({"shard of a rank": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointTensorError, match="shard of a rank"):
        _resolve(tmp_path)
    _resolve(tmp_path, "--load-format", "sharded_state")


@pytest.mark.parametrize(("quant", "fp8"), [("fp8", True), ("fp4", True), ("none", False)])
@pytest.mark.parametrize("draft", ["dspark", "mtp"])
def test_a_draft_inside_is_held_to_its_scales(
    tmp_path: Path, quant: Any, fp8: bool, draft: str
) -> None:
    """Of the target they are passed over; where the draft is used, they must fit."""
    from sglang_ext.srt.models.deepseek_v4_nextn_args import module_view
    from sglang_ext.srt.spec.bundled import draft_view

    folder = deepseek_v4.write(tmp_path, layers=4, quant=quant, **{f"with_{draft}": True})
    view = draft_view if draft == "dspark" else module_view
    assert view(folder).is_dir()
    if not fp8:
        return
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["mtp.0.attn.wkv.scale"]
    save_file(tensors, file)
    _resolve(folder)
    with pytest.raises(CheckpointTensorError, match=r"mtp\.0\.attn\.wkv\.weight: expected a \.sca"):
        view(folder)
