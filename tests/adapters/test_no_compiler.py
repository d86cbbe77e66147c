"""Nothing on the CPU path may need a C++ compiler at run time."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import torch
import sglang
from sglang.srt.layers.sampler import multinomial_with_seed
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties
from sglang.srt.managers import overlap_utils
from sglang.srt.speculative import spec_utils

torch.compile(lambda x: x + 1)(torch.ones(2))
multinomial_with_seed(torch.rand(2, 5), torch.tensor([1, 2]), torch.tensor([3, 4]))
apply_scaling_penalties(torch.randn(2, 5), torch.ones(2, 5))
import torch._inductor.codecache as codecache
assert not codecache.CppCodeCache.cache, "something was compiled"
print("eager")
"""


def test_compiled_functions_of_sglang_run_without_a_compiler(tmp_path) -> None:  # type: ignore[no-untyped-def]
    env = {k: v for k, v in os.environ.items() if k not in ("CXX", "CC", "TORCHDYNAMO_DISABLE")}
    env |= {"PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=300
    )
    assert run.stdout.strip().endswith("eager"), run.stderr[-2000:]
