"""Reads a DeepSeek-V3.2 checkpoint into the model: complete, in shape, fp8 widened.

Tensors arrive in any order, so an fp8 weight waits for its scale or the scale for its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from sglang_ext.core.quant import dequantise_fp8
from sglang_ext.srt.models.deepseek_v32_config import DeepseekV32Config
from sglang_ext.srt.models.deepseek_v32_names import (
    SCALE_SUFFIX,
    is_mtp,
    layer_of,
    placement,
    required_tensors,
)
from sglang_ext.srt.models.strict_weights import CheckpointTensorError, put, refuse_missing


class DeepseekV32TensorError(CheckpointTensorError):
    """A checkpoint whose tensors are not those its config.json calls for."""

    title = "DeepSeek-V3.2"


class TensorReader:
    """Yields the target's tensors in a float dtype, and knows afterwards what never came.

    keep: which layers this rank holds.
    """

    def __init__(self, config: DeepseekV32Config, keep: Callable[[int], bool]) -> None:
        self.config = config
        self.shapes = {
            name: shape
            for name, shape in required_tensors(config).items()
            if (layer := layer_of(name)) is None or keep(layer)
        }
        self.keep = keep
        self.seen: set[str] = set()
        self._waiting: dict[str, Tensor] = {}

    def read(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """(name, tensor) of the target, as they become complete.

        Raises:
            DeepseekV32TensorError: an unknown or repeated name, a wrong shape, fp8 without a
                scale, or a scale without fp8.
        """
        for name, tensor in weights:
            layer = layer_of(name)
            if is_mtp(name, self.config) or (layer is not None and self._elsewhere(layer)):
                continue
            target = name.removesuffix(SCALE_SUFFIX)
            if target not in self.shapes:
                raise DeepseekV32TensorError(
                    name, expected="a tensor of this architecture", found="an unknown name"
                )
            ready = self._pair(name, target, tensor)
            if ready is not None:
                self.seen.add(target)
                yield target, ready
        for name in self._waiting:
            other = "an fp8 weight" if name.endswith(SCALE_SUFFIX) else f"a {SCALE_SUFFIX} tensor"
            raise DeepseekV32TensorError(name, expected=f"{other} beside it", found="none")

    def missing(self) -> list[str]:
        return sorted(set(self.shapes) - self.seen)

    def _elsewhere(self, layer: int) -> bool:
        return layer < self.config.num_hidden_layers and not self.keep(layer)

    def _pair(self, name: str, target: str, tensor: Tensor) -> Tensor | None:
        self._check_shape(name, target, tensor)
        if name in self._waiting or (name == target and name in self.seen):
            raise DeepseekV32TensorError(name, expected="one tensor of this name", found="another")
        if name == target and tensor.dtype != torch.float8_e4m3fn:
            if not tensor.is_floating_point():
                raise DeepseekV32TensorError(
                    name, expected="bf16, fp16, fp32 or fp8 e4m3", found=tensor.dtype
                )
            return tensor
        other = target if name != target else target + SCALE_SUFFIX
        if other not in self._waiting:
            self._waiting[name] = tensor
            return None
        partner = self._waiting.pop(other)
        codes, scale = (tensor, partner) if name == target else (partner, tensor)
        assert self.config.fp8_block is not None
        if codes.is_meta:
            return codes.float()
        return dequantise_fp8(codes, scale, block=self.config.fp8_block)

    def _check_shape(self, name: str, target: str, tensor: Tensor) -> None:
        shape = self.shapes[target]
        if name != target or tensor.dtype == torch.float8_e4m3fn:
            block = self.config.fp8_block
            if block is None or len(shape) != 2:
                raise DeepseekV32TensorError(
                    name,
                    expected="no fp8 here: config.json has no quantization_config, or the tensor "
                    "is not a matrix",
                    found=f"{tensor.dtype} {list(tensor.shape)}",
                )
            if name != target:
                shape = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
        if tuple(tensor.shape) != shape:
            raise DeepseekV32TensorError(
                name, expected=f"shape {list(shape)}", found=list(tensor.shape)
            )


def check(config: DeepseekV32Config, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Hold a checkpoint's tensors, of which the values may be absent, to what the target needs.

    Raises:
        DeepseekV32TensorError: anything missing, surplus or misshaped.
    """
    reader = TensorReader(config, lambda _: True)
    for _ in reader.read(tensors):
        pass
    refuse_missing(reader.missing(), DeepseekV32TensorError)


def load(
    model: nn.Module,
    config: DeepseekV32Config,
    weights: Iterable[tuple[str, Tensor]],
    *,
    keep: Callable[[int], bool],
    partial: bool,
) -> None:
    """Load `weights` into the parameters of `model`.

    keep: which layers this rank holds. partial: a replacement of some weights of a loaded model.

    Raises:
        DeepseekV32TensorError: anything missing (unless `partial`), surplus or misshaped.
    """
    reader = TensorReader(config, keep)
    parameters = dict(model.named_parameters())
    for name, tensor in reader.read(weights):
        place = placement(name)
        parameter = parameters.get(place.parameter)
        if parameter is None:
            # The embedding and the head are on the first and the last pipeline stage only.
            continue
        put(parameter, place, tensor)
    if not partial:
        refuse_missing(reader.missing(), DeepseekV32TensorError)
