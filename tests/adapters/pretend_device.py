"""A second device on a machine that has none: tensors that say they are elsewhere.

A `Remote` tensor reports device `DEVICE` and keeps its values in ordinary memory. Inside `remote()`
an op whose tensors are on both sides raises, as it would on a GPU; so does one that makes a tensor
in ordinary memory and hands it to the others. Copies from one side to the other are allowed, and
tensors without dimensions, which every device takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")
_tensor = torch.tensor
_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class MixedDevicesError(RuntimeError):
    """An op with tensors on both sides."""


class Remote(Tensor):
    """A tensor on the pretended device."""

    here: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, here: Tensor) -> Remote:
        made: Remote = torch.Tensor._make_wrapper_subclass(
            cls,
            here.shape,
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=DEVICE,
        )
        made.here = here
        return made

    def tolist(self) -> Any:
        return self.here.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    there = [x for x in given if isinstance(x, Remote)]
    local = [x for x in given if not isinstance(x, Remote) and x.dim()]
    if there and local and func not in _COPIES:
        raise MixedDevicesError(
            f"{func}: tensors of shapes {[list(x.shape) for x in local]} are not on {DEVICE}"
        )
    remote = bool(there)
    if "device" in kwargs and kwargs["device"] is not None:
        remote = torch.device(kwargs["device"]).type == DEVICE.type
        kwargs = {**kwargs, "device": torch.device("cpu")}
    elif func is torch.ops.aten.copy_.default:
        remote = isinstance(args[0], Remote)
    plain = tree_map(lambda x: x.here if isinstance(x, Remote) else x, (args, kwargs))
    out = func(*plain[0], **plain[1])
    # What was written in place stays the same object.
    same = {id(x.here): x for x in there}

    def back(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return same.get(id(x), Remote(x) if remote else x)

    return tree_map(back, out)


def _made(data: Any, device: Any = None, **how: Any) -> Tensor:
    made = _tensor(data, **how)
    return made if device is None else made.to(device)


@contextmanager
def remote() -> Iterator[None]:
    """Inside, tensors can be made on `DEVICE`, and ops on both sides raise."""
    # By itself torch.tensor leaves the values out on this device.
    tensor = mock.patch("torch.tensor", _made)
    module = mock.patch(f"torch.{DEVICE.type}", torch.cpu, create=True)
    with tensor, module, _Mode():
        yield


def sent(x: Tensor) -> Tensor:
    """A copy of `x` on the pretended device."""
    return Remote(x.clone())
