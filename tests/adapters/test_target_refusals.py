"""What neither DeepSeek-V4 nor V3.2 is served with: flag, expected, found and remedy, for both."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from sglang_ext.srt.models.weight_files import WeightFileError
from sglang_ext.tiny_model import deepseek_v4, deepseek_v32
from tests.tiny import save_tokenizer

MODELS = ("DeepSeek-V4", "DeepSeek-V3.2")
REFUSED: tuple[tuple[object, ...], ...] = (
    ("--enable-hierarchical-cache",),
    ("--disaggregation-mode", "prefill"),
    ("--kv-cache-dtype", "fp8_e4m3"),
    ("--quantization", "fp8"),
    ("--enable-lora", "--lora-paths", "a=/nowhere"),
    ("--moe-runner-backend", "triton_kernel"),
    ("--attention-backend", "torch_native"),
    ("--decode-attention-backend", "torch_native"),
    ("--speculative-algorithm", "NGRAM"),
)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    v4 = deepseek_v4.write(tmp_path_factory.mktemp("v4") / "target", layers=4)
    v32 = deepseek_v32.write(tmp_path_factory.mktemp("v32") / "target")
    save_tokenizer(v32)
    return dict(zip(MODELS, (v4, v32), strict=True))


def _resolve(target: Path, *flags: object) -> None:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    given = ["--model-path", target, "--dtype", "float32", *flags]
    prepare_server_args([str(flag) for flag in given]).resolve_once()


@pytest.mark.parametrize("model", MODELS)
def test_a_whole_checkpoint_is_taken(targets: dict[str, Path], model: str) -> None:
    _resolve(targets[model])


@pytest.mark.parametrize("flags", REFUSED, ids=lambda flags: str(flags[0]))
@pytest.mark.parametrize("model", MODELS)
def test_flags_that_cannot_be_honoured(
    targets: dict[str, Path], model: str, flags: tuple[object, ...]
) -> None:
    message = rf"{flags[0]}: expected (unset|portable) with {model} on this package, found .*\. "
    with pytest.raises(ValueError, match=message):
        _resolve(targets[model], *flags)


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ("DeepSeek-V4", ("--pp-size", 2)),
        ("DeepSeek-V3.2", ("--speculative-algorithm", "NEXTN")),
        ("DeepSeek-V3.2", ("--speculative-algorithm", "EAGLE")),
    ],
)
def test_flags_that_one_of_them_cannot_honour(
    targets: dict[str, Path], model: str, flags: tuple[object, ...]
) -> None:
    with pytest.raises(ValueError, match=rf"{flags[0]}: expected unset with {model} "):
        _resolve(targets[model], *flags)


@pytest.mark.parametrize("model", MODELS)
def test_a_context_beyond_the_models_is_refused(targets: dict[str, Path], model: str) -> None:
    with pytest.raises(ValueError, match=r"\(4096\) is greater than the derived .*\(2048\)"):
        _resolve(targets[model], "--context-length", 4096)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("left", [4, 100, -1])
def test_truncated_weights_are_named(
    targets: dict[str, Path], tmp_path: Path, model: str, left: int
) -> None:
    shutil.copytree(targets[model], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    os.truncate(file, left % file.stat().st_size)
    message = r"model\.safetensors: expected .*, found .* bytes'\. Download the file again"
    with pytest.raises(WeightFileError, match=message):
        _resolve(tmp_path)
