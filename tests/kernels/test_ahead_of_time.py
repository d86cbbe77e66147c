"""Every Triton kernel compiles for every GPU generation, without a GPU, and none spills."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.kernels import OPS, launches
from sglang_ext.kernels.aot import TARGETS, compile_launch
from sglang_ext.kernels.launch import Launch
from tests.kernels.backend import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

# Shared memory a program may have: 99 KiB, what sm_120 gives.
SHARED_LIMIT = 99 * 1024


@pytest.mark.parametrize("op", OPS)
def test_compiles_everywhere_and_does_not_spill(op: str) -> None:
    root = Path(__file__).parents[2]
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_PTXAS")}
    command = [sys.executable, "-m", "tests.kernels.compile_op", op]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {kernel["target"] for kernel in found} == set(TARGETS)
    for kernel in found:
        assert kernel["shared"] <= SHARED_LIMIT, kernel
        assert not kernel["native_fp8"], kernel
        assert not kernel["spilled"], kernel


def test_every_triton_file_is_compiled() -> None:
    """An op added without a case here would never be compiled before a user does."""
    folder = Path(__file__).parents[2] / "sglang_ext" / "kernels"
    assert {file.parent.name for file in folder.glob("*/triton.py")} == set(OPS)
    for file in folder.glob("*/triton.py"):
        kernels = set(re.findall(r"^def (_\w+)\(", file.read_text(), re.MULTILINE))
        module = f"sglang_ext.kernels.{file.parent.name}.triton"
        started = {
            record.kernel.__name__
            for record in launches(file.parent.name)
            if record.kernel.fn.__module__ == module
        }
        named = set(re.findall(r"launch\(\s*(\w+),", file.read_text()))
        assert started == named <= kernels


def test_an_8_bit_float_argument_is_refused() -> None:
    record = launches("quant")[0]
    codes = record.args[1].view(torch.float8_e4m3fn)
    args = (record.args[0], codes, *record.args[2:])
    changed = Launch(record.kernel, record.grid, args, record.constants, 4, 1)
    with pytest.raises(TypeError, match=r"codes: expected one of .* found torch.float8_e4m3fn"):
        compile_launch(changed, 80)
