"""Reads a DeepSeek-V4 checkpoint into tensors of a float dtype: complete, in shape, widened.

    bf16, fp16, fp32      as they are
    fp8 e4m3              with one scale (ue8m0 or float) per block of rows and columns
    fp4 e2m1, two a byte  routed experts, with one ue8m0 scale per 32 columns
Tensors arrive in any order, so a quantised weight waits for its scale or the scale for its weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from sglang_ext.core.quant import FP4_BLOCK, dequantise_fp4, dequantise_fp8
from sglang_ext.srt.models.deepseek_v4_config import DeepseekV4Config
from sglang_ext.srt.models.deepseek_v4_names import (
    DRAFT_NAMES,
    SCALE,
    TARGET_NAMES,
    Shape,
    canonical,
    mtp_tensors,
    placement,
    required_tensors,
    split_experts,
)
from sglang_ext.srt.models.strict_weights import CheckpointTensorError, put, refuse_missing

_PACKED = (torch.int8, torch.uint8)
_WEIGHT = ".weight"


class DeepseekV4TensorError(CheckpointTensorError):
    """A checkpoint whose tensors are not those its config.json calls for."""

    title = "DeepSeek-V4"


class TensorReader:
    """Yields wanted tensors in a float dtype, and knows afterwards what never came.

    wanted: published name -> whole shape. passed: begin of the names that are left alone.
    """

    def __init__(
        self, config: DeepseekV4Config, wanted: dict[str, Shape], passed: tuple[str, ...]
    ) -> None:
        self.config, self.wanted, self.passed = config, wanted, passed
        self.seen: set[str] = set()
        self._waiting: dict[str, Tensor] = {}

    def read(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """(published name, tensor), as they become complete.

        Raises:
            DeepseekV4TensorError: an unknown or repeated name, a wrong shape or dtype, a
                quantised weight without a scale, or a scale without one.
        """
        for given, whole in weights:
            name = canonical(given)
            if name.startswith(self.passed):
                continue
            for own, tensor in split_experts(name, whole):
                ready = self._take(given, own, tensor)
                if ready is not None:
                    yield ready
        for name in self._waiting:
            other = "a quantised weight" if name.endswith(SCALE) else f"a {SCALE} tensor"
            raise DeepseekV4TensorError(name, expected=f"{other} beside it", found="none")

    def missing(self) -> list[str]:
        return sorted(set(self.wanted) - self.seen)

    def _take(self, given: str, name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        target = name.removesuffix(SCALE) + _WEIGHT if name.endswith(SCALE) else name
        if target != name and target not in self.wanted:
            raise DeepseekV4TensorError(given, expected="a weight it scales", found="none")
        if target not in self.wanted:
            raise DeepseekV4TensorError(
                given, expected="a tensor of this architecture", found="an unknown name"
            )
        if target in self.seen:
            raise DeepseekV4TensorError(given, expected="one tensor of this name", found="another")
        ready = self._plain(given, target, tensor) if target == name else None
        if ready is None:
            ready = self._pair(name, target, tensor)
        if ready is None:
            return None
        if tuple(ready.shape) != self.wanted[target]:
            raise DeepseekV4TensorError(
                given, expected=f"shape {list(self.wanted[target])}", found=list(ready.shape)
            )
        self.seen.add(target)
        return target, ready

    def _plain(self, given: str, name: str, tensor: Tensor) -> Tensor | None:
        """The tensor when it needs no scale, None when it does."""
        if name.endswith("tid2eid"):
            return self._table(given, tensor)
        if tensor.dtype == torch.float8_e4m3fn or tensor.dtype in _PACKED:
            return None
        if not tensor.is_floating_point():
            raise DeepseekV4TensorError(
                given, expected="bf16, fp16, fp32, fp8 e4m3 or packed fp4", found=tensor.dtype
            )
        return tensor

    def _table(self, given: str, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            raise DeepseekV4TensorError(given, expected="integers", found=tensor.dtype)
        experts = self.config.n_routed_experts
        # Of a header alone there are no values to look at.
        known = tensor.numel() and not tensor.is_meta
        if known and not 0 <= int(tensor.min()) <= int(tensor.max()) < experts:
            raise DeepseekV4TensorError(
                given, expected=f"experts 0 to {experts - 1}", found="others"
            )
        return tensor

    def _pair(self, name: str, target: str, tensor: Tensor) -> Tensor | None:
        other = target.removesuffix(_WEIGHT) + SCALE if name == target else target
        if other not in self._waiting:
            self._waiting[name] = tensor
            return None
        partner = self._waiting.pop(other)
        codes, scale = (tensor, partner) if name == target else (partner, tensor)
        return self._widen(target, codes, scale)

    def _widen(self, name: str, codes: Tensor, scale: Tensor) -> Tensor:
        packed = codes.dtype in _PACKED
        block = (1, FP4_BLOCK) if packed else self.config.fp8_block
        if block is None:
            raise DeepseekV4TensorError(
                name, expected="no fp8: config.json has no quantization_config", found=codes.dtype
            )
        if codes.dim() != 2 or (packed and ".experts." not in name):
            raise DeepseekV4TensorError(
                name, expected="a matrix, packed fp4 in routed experts only", found=codes.dtype
            )
        rows, columns = codes.shape[0], codes.shape[1] * (2 if packed else 1)
        shape = (-(-rows // block[0]), -(-columns // block[1]))
        if tuple(scale.shape) != shape:
            raise DeepseekV4TensorError(
                name + " (scale)", expected=f"shape {list(shape)}", found=list(scale.shape)
            )
        if codes.is_meta:
            return codes.new_empty(rows, columns, dtype=torch.float32)
        return dequantise_fp4(codes, scale) if packed else dequantise_fp8(codes, scale, block=block)


def check(config: DeepseekV4Config, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Hold a checkpoint's tensors, of which the values may be absent, to what the target needs.

    Raises:
        DeepseekV4TensorError: anything missing, surplus or misshaped.
    """
    check_part(config, tensors, required_tensors(config), passed=DRAFT_NAMES)


def check_module(config: DeepseekV4Config, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """`check` for the MTP module. config: the module's, a model of one window layer.

    Raises:
        DeepseekV4TensorError: anything missing, surplus or misshaped.
    """
    check_part(config, tensors, mtp_tensors(config), passed=TARGET_NAMES)


def check_part(
    config: DeepseekV4Config,
    tensors: Iterable[tuple[str, Tensor]],
    wanted: dict[str, Shape],
    *,
    passed: tuple[str, ...],
) -> None:
    """`check` for a part of a checkpoint; the names that begin with `passed` are another's."""
    reader = TensorReader(config, wanted, passed)
    for _ in reader.read(tensors):
        pass
    refuse_missing(reader.missing(), DeepseekV4TensorError)


def load(
    model: nn.Module,
    config: DeepseekV4Config,
    weights: Iterable[tuple[str, Tensor]],
    wanted: dict[str, Shape],
    *,
    partial: bool,
    passed: tuple[str, ...] = DRAFT_NAMES,
) -> None:
    """Load `weights` into the parameters of the target, or of the draft it carries.

    partial: a replacement of some weights of a loaded model. passed: begin of the names that are
    left alone, the other model's.

    Raises:
        DeepseekV4TensorError: anything missing (unless `partial`), surplus or misshaped.
    """
    reader = TensorReader(config, wanted, passed)
    parameters = dict(model.named_parameters())
    for name, tensor in reader.read(weights):
        place = placement(name)
        parameter = parameters[place.parameter]
        put(parameter, place, tensor)
    if not partial:
        refuse_missing(reader.missing(), DeepseekV4TensorError)
