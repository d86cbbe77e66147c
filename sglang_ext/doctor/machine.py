"""The machine below SGLang: packages, device, number formats, memory, ports."""

from __future__ import annotations

import importlib.util
import os
import platform as machine
import shutil
import socket
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import psutil

from sglang_ext.doctor.report import Check

PINNED = {"sglang": "0.5.23"}
PACKAGES = ("sglang", "sglang-kernel", "torch", "triton", "transformers", "safetensors")
OPTIONAL = {
    "deep_ep": "expert dispatch runs over torch.distributed instead of DeepEP",
    "flashinfer": "FlashInfer's attention and MoE backends are not available",
    "matplotlib": "reports and benches have no plots",
}
# SGLang's default port, and those it derives.
PORTS = (30000, 30001)
_GIB = 1 << 30
# Ranks, tokenizer and detokenizer pass tensors and batches through it.
_LEAST_SHM = 1 * _GIB


def packages() -> Iterator[Check]:
    for name in PACKAGES:
        wanted = name if name not in PINNED else f"{name}=={PINNED[name]}"
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Check(f"package {name}", "fail", "not installed", f"pip install {wanted}")
            continue
        fits = PINNED.get(name, found) == found
        yield Check(
            f"package {name}",
            "ok" if fits else "fail",
            found,
            "" if fits else f"pip install {wanted}",
        )
    for name, without in OPTIONAL.items():
        if importlib.util.find_spec(name) is None:
            yield Check(f"package {name}", "note", f"not installed: {without}")
        else:
            yield from _imports(name)


def _imports(name: str) -> Iterator[Check]:
    """Installed is not enough: DeepEP and FlashInfer are built for one CUDA and one torch."""
    import torch

    try:
        __import__(name)
    except Exception as error:
        found = f"installed, cannot be imported: {error}"
        # Where there is no GPU, nothing that is built would find one.
        remedy = f"Build {name} for this torch." if torch.cuda.is_available() else ""
        yield Check(f"package {name}", "note", found[:200], remedy)
    else:
        yield Check(f"package {name}", "ok", "importable")


def device() -> Iterator[Check]:
    import torch

    if not torch.cuda.is_available():
        flags = [f for f in ("avx2", "avx512_bf16", "amx_bf16") if f in _cpu_flags()]
        found = f"{machine.machine()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads"
        yield Check("device", "ok", f"CPU ({found})")
        yield Check("bf16 matrix units", "ok" if len(flags) > 1 else "note", ", ".join(flags))
        yield Check("fp8, fp4", "ok", "emulated in torch: weights are dequantised")
        return
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        found = f"{name}, capability {capability}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
        yield Check(f"device cuda:{index}", "ok", found)
    yield from _formats(torch.cuda.get_device_capability())


def _formats(capability: tuple[int, int]) -> Iterator[Check]:
    """fp8 tensor cores came with 8.9, fp4 ones with 10.0 (CUDA programming guide)."""
    for name, since in (("fp8", (8, 9)), ("fp4", (10, 0))):
        native = capability >= since
        found = "native" if native else "none: weights are dequantised"
        yield Check(name, "ok" if native else "note", found)


def _cpu_flags() -> str:
    try:
        with open("/proc/cpuinfo") as handle:
            return next((line for line in handle if line.startswith("flags")), "")
    except OSError:
        return ""


def memory() -> Iterator[Check]:
    found = psutil.virtual_memory()
    text = f"{found.available / _GIB:.1f} of {found.total / _GIB:.1f} GiB available"
    yield Check("memory", "ok" if found.available > 2 * _GIB else "note", text)
    try:
        shm = shutil.disk_usage("/dev/shm")
    except OSError as error:
        yield Check("/dev/shm", "note", str(error))
        return
    low = shm.free < _LEAST_SHM
    yield Check(
        "/dev/shm",
        "note" if low else "ok",
        f"{shm.free / _GIB:.1f} of {shm.total / _GIB:.1f} GiB free",
        "Start the container with --shm-size=8g, or several ranks may fail." if low else "",
    )


def ports() -> Iterator[Check]:
    taken = [port for port in PORTS if not _is_free(port)]
    if taken:
        yield Check("ports", "note", f"in use: {taken}", "Start the server with --port N.")
    else:
        yield Check("ports", "ok", f"free: {', '.join(map(str, PORTS))}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
