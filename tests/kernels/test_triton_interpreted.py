"""The tests of every op with a Triton implementation, run under Triton's interpreter.

A process of its own: the interpreter has to be chosen before Triton is first imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.backend import INTERPRETED

HERE = Path(__file__).parent
FILES = (
    "test_hyper_connection.py",
    "test_router.py",
    "test_swiglu.py",
    "test_quant.py",
    "test_grouped_output.py",
    "test_nsa.py",
    "test_v4_implementations.py",
    "test_v32_implementations.py",
)


@pytest.mark.skipif(INTERPRETED, reason="this is the process that the test starts")
@pytest.mark.parametrize("file", FILES)
def test_triton_under_its_interpreter(file: str) -> None:
    command = [sys.executable, "-m", "pytest", str(HERE / file), "-p", "no:cacheprovider"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter makes Triton available everywhere")
def test_triton_by_name_without_a_gpu_is_refused() -> None:
    import torch

    from sglang_ext.kernels.choice import runs_triton

    cpu = torch.device("cpu")
    assert not runs_triton("op", "auto", cpu)
    assert runs_triton("op", "auto", torch.device("cuda"))
    with pytest.raises(ValueError, match="expected a CUDA device and an installed Triton"):
        runs_triton("op", "triton", cpu)
    with pytest.raises(ValueError, match="expected one of auto, torch, triton, found 'fast'"):
        runs_triton("op", "fast", cpu)
