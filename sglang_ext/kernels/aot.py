"""Compile recorded launches for GPUs that are not there, and read what they need.

No driver and no GPU is used: Triton's compiler and the ptxas that comes with it work on any host.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_ext.kernels.launch import Launch

# sm_80 A100, sm_90 H100/H200, sm_100 B200, sm_120 RTX 50 and RTX PRO Blackwell.
TARGETS = (80, 90, 100, 120)

# 8-bit floats are absent on purpose: kernels read such storage as bytes.
_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True)
class Resources:
    """What one program of a compiled kernel takes.

    Attributes:
        kernel: name of the function.
        target: compute capability, 90 for sm_90.
        registers: per thread.
        spilled: bytes stored to and loaded from local memory per thread for want of registers.
        shared: bytes of shared memory per program.
        warps: warps per program.
    """

    kernel: str
    target: int
    registers: int
    spilled: int
    shared: int
    warps: int

    def as_json(self) -> dict[str, int | str]:
        return asdict(self)


def _pointer_type(kernel: Any, name: str, dtype: torch.dtype) -> str:
    if dtype not in _POINTERS:
        raise TypeError(
            f"{kernel.__name__}, {name}: expected one of {list(_POINTERS)}, found {dtype}; "
            "pass 8-bit storage as uint8"
        )
    return _POINTERS[dtype]


def _source(launch: Launch) -> Any:
    """The compiler's input with the specialisation a real launch has.

    Allocations start at multiples of 16 bytes; an int that is a multiple of 16 is known to be
    one, and 1 is a constant.
    """
    from triton.compiler import ASTSource

    names = launch.kernel.arg_names
    signature, constants, attrs = {}, dict(launch.constants), {}
    for index, (name, value) in enumerate(zip(names, launch.args, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[name] = _pointer_type(launch.kernel, name, value.dtype)
            attrs[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1:
            constants[name] = 1
        else:
            signature[name] = "i32"
            if value % 16 == 0:
                attrs[(index,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    return ASTSource(
        launch.kernel,
        signature={name: signature[name] for name in names},
        constexprs=constants,
        attrs=attrs,
    )


def compile_launch(launch: Launch, target: int) -> Any:
    """The compiled kernel for compute capability `target`; raises what Triton or ptxas raise."""
    import triton
    from triton.backends.compiler import GPUTarget

    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    return triton.compile(_source(launch), target=GPUTarget("cuda", target, 32), options=options)


def read_resources(compiled: Any, target: int) -> Resources:
    """What ptxas reports for the compiled kernel's PTX under the options Triton gives it.

    Spills are read rather than inferred from the stack frame, which alignment alone can cause.
    """
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(compiled.asm["ptx"])
        options = ["-lineinfo", "-v", "--regAllocOptLevel=2"]
        options += [f"--gpu-name={sm_arch_from_capability(target)}", "-o", f"{folder}/kernel.cubin"]
        command = [get_ptxas(target).path, *options, str(source)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills, registers = _SPILLS.search(text), _REGISTERS.search(text)
    if spills is None or registers is None:
        raise RuntimeError(f"ptxas, report: expected spills and registers, found {text!r}")
    return Resources(
        kernel=compiled.name,
        target=target,
        registers=int(registers[1]),
        spilled=int(spills[1]) + int(spills[2]),
        shared=compiled.metadata.shared,
        warps=compiled.metadata.num_warps,
    )
