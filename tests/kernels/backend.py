"""What tests of ops with several implementations share.

The same tests run in torch and, in a process of their own (`test_triton_interpreted.py`), in
Triton under its interpreter. On a machine with CUDA they run in Triton on the GPU as well.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# The interpreter multiplies matrices in NumPy, which has no bfloat16 and takes its bits for ints.
MATMUL_DTYPES = (torch.float32, torch.float16 if INTERPRETED else torch.bfloat16)


@dataclass(frozen=True)
class Backend:
    """implementation: name the op is called with. device: where its tensors are."""

    implementation: str
    device: str

    def place(self, x: Tensor) -> Tensor:
        """A copy of x on the device, in the middle of storage whose other values are NaN.

        What an op reads beyond its argument then shows in the result.
        """
        margin = 256
        if x.is_floating_point() and x.dtype.itemsize > 1:
            storage = torch.full((x.numel() + 2 * margin,), float("nan"), dtype=x.dtype)
        else:
            storage = torch.full((x.numel() + 2 * margin,), 127, dtype=torch.int64).to(x.dtype)
        storage = storage.to(self.device)
        storage[margin : margin + x.numel()] = x.reshape(-1).to(self.device)
        return storage[margin : margin + x.numel()].view(x.shape)


def backends() -> list[Backend]:
    if INTERPRETED:
        return [Backend("triton", "cpu")]
    found = [Backend("torch", "cpu")]
    if torch.cuda.is_available():
        found.append(Backend("triton", "cuda"))
    return found
