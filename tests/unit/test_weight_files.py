"""Weight files that are missing or cut short, known before anything is loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sglang_ext.srt.models.weight_files import WeightFileError, check_whole

FILES = ("model-1.safetensors", "model-2.safetensors")
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in FILES:
        save_file({name: torch.zeros(3)}, tmp_path / name)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {name: name for name in FILES}}))
    return tmp_path


def test_whole_files_pass(folder: Path) -> None:
    check_whole(folder)
    (folder / INDEX).unlink()
    check_whole(folder)
    check_whole(folder / "of a hub")


def test_a_file_that_the_index_does_not_name_does_not_count(folder: Path) -> None:
    (folder / "consolidated.safetensors").write_bytes(b"cut")
    check_whole(folder)


@pytest.mark.parametrize("left", [0, 5, 40, -1])
def test_a_file_that_is_cut_is_named(folder: Path, left: int) -> None:
    file = folder / FILES[1]
    os.truncate(file, left % file.stat().st_size)
    with pytest.raises(WeightFileError, match=r"model-2.safetensors: expected .* found .* bytes"):
        check_whole(folder)


@pytest.mark.parametrize("header", [b"[]", b'{"w": {}}', b'{"w": {"data_offsets": 4}}'])
def test_a_header_that_describes_no_tensors_is_named(folder: Path, header: bytes) -> None:
    (folder / FILES[1]).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(WeightFileError, match=r"model-2.safetensors: expected a safetensors head"):
        check_whole(folder)


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / FILES[0]).unlink()
    with pytest.raises(WeightFileError, match=r"model-1.safetensors: expected a file, as model"):
        check_whole(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": [1]}'])
def test_an_index_that_is_none_is_named(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(WeightFileError, match=r"index.json: expected JSON with a weight_map"):
        check_whole(folder)
