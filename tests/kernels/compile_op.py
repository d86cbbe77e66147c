"""Compiles one op for every target and prints what was found, in a process of its own.

Run as `python -m tests.kernels.compile_op OP`. Libraries that a test run imports along the way
change how Triton compiles; a process that imports nothing else gives what the kernels need.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from bench.kernels import launches
from sglang_ext.kernels.aot import TARGETS, compile_launch, read_resources


def compiled(op: str) -> list[dict[str, Any]]:
    """For every launch and target: the resources, and whether a native fp8 type occurs."""
    found = []
    for record in launches(op):
        for target in TARGETS:
            kernel = compile_launch(record, target)
            assert kernel.asm["cubin"]
            # An 8-bit float type would not compile below sm_89, or be emulated.
            native = bool(re.search(r"f8E\dM\d", kernel.asm["ttir"]))
            found.append(read_resources(kernel, target).as_json() | {"native_fp8": native})
    return found


if __name__ == "__main__":
    print(json.dumps(compiled(sys.argv[1])))
