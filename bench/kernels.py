"""What every Triton kernel takes from a GPU: registers, spills, shared memory, per target.

Each op is called on tensors of the "meta" device at the shapes of the models that use it. The
kernels it would launch are recorded and compiled ahead of time, so the table needs no GPU and says
nothing about speed.

    python -m bench.kernels [--only PART] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from sglang_ext.kernels.aot import TARGETS, Resources, compile_launch, read_resources
from sglang_ext.kernels.launch import Launch, recording

TOKENS = 100


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _wide(*shape: int) -> Tensor:
    return _meta(*shape, dtype=torch.float32)


def _bytes(*shape: int) -> Tensor:
    return _meta(*shape, dtype=torch.uint8)


def _long(*shape: int) -> Tensor:
    return _meta(*shape, dtype=torch.int64)


def hyper_connection() -> None:
    """DeepSeek-V4-Flash: four streams of 4096."""
    from sglang_ext.kernels.hyper_connection import triton as op

    streams = _meta(TOKENS, 4, 4096)
    mix = op.hc_pre_triton(
        streams, _wide(24, 16384), _wide(24), _wide(3), iters=20, eps=1e-6, rms_eps=1e-6
    )
    op.hc_post_triton(mix.x, streams, mix.post, mix.comb)
    op.hc_head_triton(streams, _wide(4, 16384), _wide(4), _wide(1), eps=1e-6, rms_eps=1e-6)


def router() -> None:
    """Flash (256 experts), Pro (384) and V3.2 (8 groups of 32)."""
    from sglang_ext.kernels.router import triton as op

    plain = {"sigmoid": False, "n_group": 1, "topk_group": 0, "top_k": 6}
    grouped = {"sigmoid": True, "n_group": 8, "topk_group": 4, "top_k": 8}
    op.route_top_k_triton(_wide(TOKENS, 256), _wide(256), **plain, scaling=1.5)
    op.route_top_k_triton(_wide(TOKENS, 384), _wide(384), **plain, scaling=2.5)
    op.route_top_k_triton(_wide(TOKENS, 256), _wide(256), **grouped, scaling=2.5)
    op.route_hash_triton(_wide(TOKENS, 256), _long(TOKENS), _long(129280, 6), scaling=1.5)


def swiglu() -> None:
    """The shared expert of Flash, gate and up as halves of one tensor."""
    from sglang_ext.kernels.swiglu import triton as op

    for dtype in (torch.bfloat16, torch.float32):
        op.clamped_swiglu_triton(*_meta(TOKENS, 4096, dtype=dtype).chunk(2, dim=-1), 10.0)


def quant() -> None:
    """Activations and weights of 4096 columns, with ue8m0 (V4) and float (V3.2) scales."""
    from sglang_ext.kernels.quant import triton as op

    op.act_quant_triton(_meta(TOKENS, 4096), 128)
    for scale in (_bytes(16, 32), _wide(16, 32)):
        op.dequantise_fp8_triton(_bytes(2048, 4096), scale, (128, 128), torch.bfloat16)
    op.dequantise_fp4_triton(_bytes(2048, 2048), _bytes(2048, 128), torch.bfloat16)


def grouped_output() -> None:
    """Flash: 64 heads of 512 in 8 groups; float32 for the exact mode."""
    from sglang_ext.kernels.grouped_output import triton as op

    for dtype in (torch.bfloat16, torch.float32):
        o, weight = _meta(TOKENS, 64, 512, dtype=dtype), _meta(8, 1024, 4096, dtype=dtype)
        op.grouped_output_triton(o, _wide(TOKENS, 32), _wide(TOKENS, 32), weight)


def nsa() -> None:
    """The paper's sizes: 64 query heads of 192, 4 key heads, values of 128."""
    from sglang_ext.core.nsa import NsaKeys, NsaSpec
    from sglang_ext.kernels.nsa import triton as op

    spec, tokens = NsaSpec(), 4096
    entries = spec.entries(tokens)
    for dtype in (torch.bfloat16, torch.float32):
        shapes = [(length, 4, dim) for length in (entries, tokens, tokens) for dim in (192, 128)]
        keys = NsaKeys(*(_meta(*shape, dtype=dtype) for shape in shapes))
        q, gates = _meta(TOKENS, 64, 192, dtype=dtype), _wide(TOKENS, 64, 3)
        op.native_sparse_attention_triton(q, keys, gates, _long(TOKENS), spec, 192**-0.5)


def nsa_compress() -> None:
    """The paper's sizes: keys of 192 of 4 heads, entries of 32 tokens."""
    from sglang_ext.core.nsa import NsaSpec
    from sglang_ext.kernels.nsa_compress import triton as op

    spec = NsaSpec()
    for dtype in (torch.bfloat16, torch.float32):
        x, position = (_meta(rows, 4, 192, dtype=dtype) for rows in (4096, spec.length))
        weight = _meta(4, spec.length, 192, 192, dtype=dtype)
        op.compress_entries_triton(x, position, weight, spec)


def compress() -> None:
    """CSA and HCA entries of 512 and index keys of 128."""
    from sglang_ext.kernels.compress import triton as op

    for ratio, series, dim in ((4, 2, 512), (128, 1, 512), (4, 2, 128)):
        raw, members = _wide(4096, 2 * series * dim), _long(TOKENS, series * ratio)
        angles = (_wide(TOKENS, 32), _wide(TOKENS, 32))
        op.compress_blocks_triton(raw, members, _meta(dim), 1e-6, *angles, ratio)


def indexer() -> None:
    """64 index heads of 128 over 8192 entries, top 512."""
    from sglang_ext.kernels.indexer import triton as op

    for dtype in (torch.bfloat16, torch.float32):
        q, pool = _meta(4, 25, 64, 128, dtype=dtype), _meta(65536, 128, dtype=dtype)
        op.index_scores_triton(q, _wide(4, 25, 64), pool, _long(4, 8192), _long(4, 25))


def index_vectors() -> None:
    """64 index heads of 128, 64 dims of them rotated; V3.2's as they are and for fp8, and V4's."""
    from sglang_ext.kernels.index_vectors import Precision
    from sglang_ext.kernels.index_vectors import triton as op

    angles, norm = (_wide(TOKENS, 32), _wide(TOKENS, 32)), (_meta(128), _meta(128))
    q, k = _meta(TOKENS, 64, 128), _meta(TOKENS, 1, 128)
    for precision in Precision:
        op.index_vectors_triton(q, None, *angles, precision)
        op.index_vectors_triton(k, norm, *angles, precision)
    op.trailing_pairs_triton(q, *angles)


def top_k() -> None:
    """The best 512 of 8192 entries; sizes are no constants of the kernel."""
    from sglang_ext.kernels.top_k import triton as op

    op.best_entries_triton(_wide(4, 25, 8192), _long(4, 8192), _long(4, 25), 512)


def sparse_attention() -> None:
    """Flash (window of 128, 512 entries, sink) and V3.2 (2048 of 576, values of 512)."""
    from sglang_ext.kernels.sparse_attention import Rows
    from sglang_ext.kernels.sparse_attention import triton as op

    for dtype in (torch.bfloat16, torch.float32):
        pool = _meta(65536, 512, dtype=dtype)
        sources = (Rows(pool, _long(TOKENS, 128)), Rows(pool, _long(TOKENS, 512)))
        q, sink = _meta(TOKENS, 64, 512, dtype=dtype), _wide(64)
        op.sparse_attention_triton(q, sources, sink, 512**-0.5, 512)
        wide = Rows(_meta(65536, 576, dtype=dtype), _long(TOKENS, 2048))
        op.sparse_attention_triton(
            _meta(TOKENS, 128, 576, dtype=dtype), (wide,), None, 192**-0.5, 512
        )


def latent_attention() -> None:
    """V3.2: 128 heads over latents of 512 + 64, and expanded to keys of 192 and values of 128."""
    from sglang_ext.kernels.latent_attention import triton as op

    for dtype in (torch.bfloat16, torch.float32):
        q, latents = _meta(4, 3, 128, 576, dtype=dtype), _meta(4, 2048, 576, dtype=dtype)
        op.attend_visible_triton(q, latents, _long(4, 3), 512, 192**-0.5)
        q, keys = (_meta(rows, 128, 192, dtype=dtype) for rows in (TOKENS, 1024 + TOKENS))
        values = _meta(1024 + TOKENS, 128, 128, dtype=dtype)
        op.attend_expanded_triton(q, keys, values, 1024, 192**-0.5)


def indexer_v32() -> None:
    """V3.2: 64 index heads of 128 over 8192 tokens, as vectors and as fp8 bytes."""
    from sglang_ext.kernels.indexer_v32 import triton as op

    rest = (_wide(4, 25, 64), _long(4, 25))
    for dtype in (torch.bfloat16, torch.float32):
        q, keys = _meta(4, 25, 64, 128, dtype=dtype), _meta(4, 8192, 128, dtype=dtype)
        op.scores_triton(q, rest[0], keys, rest[1])
    q, keys = ((_bytes(4, *n, 128), _bytes(4, *n, 1)) for n in ((25, 64), (8192,)))
    op.byte_scores_triton(q, rest[0], keys, rest[1])


OPS: dict[str, Callable[[], None]] = {
    "hyper_connection": hyper_connection,
    "router": router,
    "swiglu": swiglu,
    "quant": quant,
    "grouped_output": grouped_output,
    "compress": compress,
    "index_vectors": index_vectors,
    "indexer": indexer,
    "indexer_v32": indexer_v32,
    "top_k": top_k,
    "sparse_attention": sparse_attention,
    "latent_attention": latent_attention,
    "nsa": nsa,
    "nsa_compress": nsa_compress,
}


def launches(op: str) -> list[Launch]:
    """What one op starts at its production shapes."""
    with recording() as records:
        OPS[op]()
    return records


def measured(op: str, targets: tuple[int, ...] = TARGETS) -> Iterator[tuple[Launch, Resources]]:
    """Every launch of `op`, compiled for every target."""
    for record in launches(op):
        for target in targets:
            yield record, read_resources(compile_launch(record, target), target)


def variant(launch: Launch) -> str:
    """What tells two launches of one kernel apart: its first argument and its constants."""
    constants = " ".join(f"{k}={v}" for k, v in launch.constants.items())
    return f"{str(launch.args[0].dtype).removeprefix('torch.')} {constants}"


def markdown(rows: list[dict[str, object]]) -> str:
    """One line per launch, registers / spilled bytes / shared KiB of every target."""
    head = [f"sm_{target}" for target in TARGETS]
    lines = [f"| op | kernel | variant | {' | '.join(head)} |", "|" + "---|" * (3 + len(head))]
    table: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        key = (str(row["op"]), f"`{row['kernel']}`", str(row["variant"]))
        kibibytes = int(str(row["shared"])) / 1024
        cells = table.setdefault(key, [])
        if len(cells) < len(head):  # an op may start one variant more than once
            cells.append(f"{row['registers']} / {row['spilled']} / {kibibytes:.1f}")
    lines += [f"| {' | '.join([*key, *cells])} |" for key, cells in table.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of an op's name")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    rows = [
        {"op": op, "variant": variant(record), **found.as_json()}
        for op in OPS
        if args.only in op
        for record, found in measured(op)
    ]
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(markdown(rows))


if __name__ == "__main__":
    main()
