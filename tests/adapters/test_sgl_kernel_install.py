"""`install()` in a process of its own: what SGLang then finds, and what it must not find."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest


def run(body: str) -> dict[str, object]:
    """Runs `body`, which fills `result`, in a fresh interpreter."""
    code = "import json\nresult = {}\n" + textwrap.dedent(body) + "\nprint(json.dumps(result))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


BROKEN_LIBRARY = """
import sys, pathlib, tempfile
folder = pathlib.Path(tempfile.mkdtemp(), "sgl_kernel")
folder.mkdir()
(folder / "version.py").write_text("__version__ = '9.9'")
(folder / "__init__.py").write_text(
    "from sgl_kernel.version import __version__\\n"
    "raise ImportError('attempts:\\\\n- ImportError: libcuda.so.1: not found\\\\n- other')"
)
sys.path.insert(0, str(folder.parent))
from sglang_ext.srt.sgl_kernel_torch import install
"""

WORKING_LIBRARY = """
import sys, types
sys.modules["sgl_kernel"] = real = types.ModuleType("sgl_kernel")
from sglang_ext.srt.sgl_kernel_torch import install
"""


def test_stand_in_replaces_a_library_that_cannot_be_imported() -> None:
    found = run(
        BROKEN_LIBRARY
        + """
report = install()
import importlib.util
import sgl_kernel, sgl_kernel.version, sgl_kernel.flash_attn, sgl_kernel.mamba
from importlib import metadata
from sgl_kernel import assign_req_to_token_pool_cpu, some_cuda_kernel
from sgl_kernel.scalar_type import ScalarType, scalar_types
from sgl_kernel.speculative import assign_req_to_token_pool_cpu as same
try:
    metadata_version = metadata.version("sglang-kernel")
except metadata.PackageNotFoundError:
    metadata_version = "0.4.10"
result = dict(
    stand_in=report.stand_in,
    reason=report.reason,
    version=sgl_kernel.__version__ == sgl_kernel.version.__version__ == metadata_version,
    path=sgl_kernel.__path__,
    spec=importlib.util.find_spec("sgl_kernel").name,
    same=assign_req_to_token_pool_cpu is same,
    lazy=callable(some_cuda_kernel),
    dunder=hasattr(sgl_kernel, "__wrapped__"),
    again=install() is report,
    bits=scalar_types.uint4b8.size_bits,
    sglang=[name for name in sys.modules if name.split(".")[0] == "sglang"],
)
"""
    )
    assert found == {
        "stand_in": True,
        "reason": "ImportError: libcuda.so.1: not found",
        "version": True,
        "path": [],
        "spec": "sgl_kernel",
        "same": True,
        "lazy": True,
        "dunder": False,
        "again": True,
        "bits": 4,
        "sglang": [],
    }


def test_unknown_function_raises_when_called_and_says_what_to_do() -> None:
    found = run(
        BROKEN_LIBRARY
        + """
install()
from sgl_kernel.elementwise import rmsnorm
try:
    rmsnorm(1, 2)
except NotImplementedError as error:
    result["message"] = str(error)
"""
    )
    message = str(found["message"])
    assert message.startswith("sgl_kernel.elementwise.rmsnorm: needs the CUDA library")
    assert "libcuda.so.1" in message
    assert "run on a machine with a CUDA GPU" in message


def test_unknown_submodule_is_still_an_import_error() -> None:
    found = run(
        BROKEN_LIBRARY
        + """
install()
try:
    import sgl_kernel.no_such_module
except ModuleNotFoundError:
    result["missing"] = True
"""
    )
    assert found == {"missing": True}


def test_working_library_is_left_in_place_and_only_gains_cpu_ops() -> None:
    found = run(
        WORKING_LIBRARY
        + """
report = install()
result = dict(
    kept=sys.modules["sgl_kernel"] is real,
    stand_in=report.stand_in,
    functions=report.functions,
    ops="assign_req_to_token_pool_cpu" in report.ops,
)
"""
    )
    assert found == {"kept": True, "stand_in": False, "functions": [], "ops": True}


def test_ops_already_defined_are_not_defined_again() -> None:
    found = run(
        """
import torch
library = torch.library.Library("sgl_kernel", "FRAGMENT")
library.define("rmsnorm_cpu(Tensor x) -> Tensor")
library.impl("rmsnorm_cpu", lambda x: x + 1, "CPU")
"""
        + BROKEN_LIBRARY
        + """
result["defined"] = "rmsnorm_cpu" in install().ops
result["kept"] = torch.ops.sgl_kernel.rmsnorm_cpu(torch.zeros(1)).item()
"""
    )
    assert found == {"defined": False, "kept": 1.0}


@pytest.mark.parametrize(
    "name", ["convert_weight_packed", "fused_qk_norm_cpu", "fused_qk_norm_rope_cpu"]
)
def test_names_that_switch_on_amx_code_stay_undefined(name: str) -> None:
    found = run(
        BROKEN_LIBRARY
        + f"""
import torch
install()
result["defined"] = hasattr(torch.ops.sgl_kernel, "{name}")
"""
    )
    assert found == {"defined": False}


def test_every_op_can_be_called_through_the_dispatcher() -> None:
    found = run(
        BROKEN_LIBRARY
        + """
import torch
install()
ops = torch.ops.sgl_kernel
pool = torch.zeros(2, 4, dtype=torch.int32)
one = torch.tensor([1])
ops.assign_req_to_token_pool_cpu(one, pool, one, one + 2, torch.tensor([7, 8]), 4)
x, gate = torch.ones(1, 2), torch.zeros(1, 2)
ops.fused_sigmoid_mul_cpu(x, gate)
weights, ids = ops.fused_moe_router_cpu(0.0, torch.ones(1, 2), torch.eye(2), 1, False)
hashed = ops.murmur_hash32_cpu.default(one, one, torch.arange(3))
result = dict(
    pool=pool.tolist(), gated=x.tolist(), ids=ids.tolist(), hashed=list(hashed.shape)
)
"""
    )
    assert found == {
        "pool": [[0, 0, 0, 0], [0, 7, 8, 0]],
        "gated": [[0.5, 0.5]],
        "ids": [[0]],
        "hashed": [1, 3],
    }
