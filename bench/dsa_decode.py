"""Where a decode step of a served DeepSeek model spends its time as the context grows.

Tiny models with the widths, windows and top-k of DeepSeek-V4-Flash and V3.2 and an eighth of their
heads; loader, token pool, backend and forward are those of a server's model rank, for one request
of one new token. Beside each, in the same run, the same model made dense: V3.2 with an index_topk
that no context exceeds, V4 of window layers whose window is the context.

Prefilling 65,536 tokens would take hours here, so the cache is filled with random rows, of which
the indexer selects; before that, a step behind a prompt of more than top-k tokens must equal the
same token prefilled. Bytes per token and layer are read off the pool and must equal the formula.

    python -m bench.dsa_decode --out dsa_decode.json --plot dsa_decode.png
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from bench.model_rank import forward_batch, model_rank
from bench.panels import over_context
from bench.report import environment
from sglang_ext.srt.attention import dsa, dsv4
from sglang_ext.srt.cache import dsa_pool, dsv4_pool
from sglang_ext.srt.models import deepseek_v4_attention, deepseek_v32_attention
from sglang_ext.tiny_model import deepseek_v4, deepseek_v32
from sglang_ext.tiny_model.tokenizer import save_tokenizer

TOLERANCE = 1e-3
KINDS = {0: "window", 4: "CSA", 128: "HCA"}
Row = dict[str, float]


@dataclass(frozen=True)
class Subject:
    """A model and its dense counterpart.

    write: makes a checkpoint of config fields. prompt: tokens of which a row reads a part.
    """

    write: Callable[..., Path]
    fields: dict[str, Any]
    dense: dict[str, Any]
    prompt: int


def _write_v32(folder: Path, **fields: Any) -> Path:
    save_tokenizer(deepseek_v32.write(folder, **fields), 264)
    return folder


_EIGHTH = {"hidden_size": 512, "num_attention_heads": 8, "index_n_heads": 8, "mixing": 1.0}
SUBJECTS = {
    "DeepSeek-V4": Subject(
        deepseek_v4.write,
        _EIGHTH
        | {
            "layers": 3,
            "compress_ratios": [0, 4, 128],
            "head_dim": 512,
            "qk_rope_head_dim": 64,
            "q_lora_rank": 128,
            "o_groups": 1,
            "o_lora_rank": 128,
            "index_head_dim": 128,
            "index_topk": 512,
            "sliding_window": 128,
            "moe_intermediate_size": 256,
        },
        dense={"compress_ratios": [0, 0, 0]},
        prompt=2200,
    ),
    "DeepSeek-V3.2": Subject(
        _write_v32,
        _EIGHTH
        | {
            "num_hidden_layers": 3,
            "q_lora_rank": 192,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "index_head_dim": 128,
            "index_topk": 2048,
            "intermediate_size": 1024,
            "moe_intermediate_size": 256,
        },
        dense={"index_topk": 1 << 20},
        prompt=2200,
    ),
}


class Clock:
    """Seconds by section; what a section inside another takes is not the outer one's."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.spent[self._open[-1]] += now - self._since
        self._since = now

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def timed(self, function: Callable[..., Any], name: Callable[..., str | None]) -> Any:
        """The function with its time kept under `name` of its arguments; None: the caller's."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            found = name(*args, **kwargs)
            if found is None:
                return function(*args, **kwargs)
            with self.section(found):
                return function(*args, **kwargs)

        return run


def _attention_of(*_: Any, v4: Any, **__: Any) -> str:
    return f"attention, {KINDS[v4.ratio]}"


def _if_indexed(call: Any, *_: Any) -> str | None:
    """HCA layers read all their entries: listing them is part of attention."""
    return None if call.inputs.index is None else "indexer"


def _if_index_keys(call: Any, mapped: Any, new: Any, source: str, target: str) -> str | None:
    return "indexer" if target == "index_key" else None


def _always(name: str) -> Callable[..., str]:
    return lambda *_, **__: name


# The layer's own projections and its norm belong to the rest; the indexer's belong to it.
SECTIONS: tuple[tuple[Any, str, Callable[..., str | None]], ...] = (
    (dsa.DsaAttnBackend, "forward", _always("attention")),
    (dsa._LayerCall, "_selected_slots", _always("indexer")),
    (deepseek_v32_attention.Indexer, "key", _always("indexer")),
    (dsv4.Dsv4AttnBackend, "forward", _attention_of),
    (dsv4._LayerCall, "_entry_rows", _if_indexed),
    (dsv4._LayerCall, "_compress", _if_index_keys),
    (deepseek_v4_attention.SharedLatentAttention, "_index", _always("indexer")),
)


@contextmanager
def sections(clock: Clock) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, attribute, name in SECTIONS:
            timed = clock.timed(getattr(owner, attribute), name)
            stack.enter_context(mock.patch.object(owner, attribute, timed))
        yield


class Request:
    """One request in the runner's pools, with slots for `room` tokens."""

    def __init__(self, runner: Any, room: int) -> None:
        self.runner, self.row = runner, torch.tensor([1])
        runner.req_to_token_pool.clear()
        runner.token_to_kv_pool_allocator.clear()
        self.slots = runner.token_to_kv_pool_allocator.alloc(room)
        runner.req_to_token_pool.req_to_token[1, :room] = self.slots.int()

    @torch.inference_mode()
    def prefill(self, ids: list[int]) -> Tensor:
        """Logits behind the last token, [vocabulary]."""
        count = torch.tensor([len(ids)])
        return self._logits(
            ForwardMode.EXTEND,
            count,
            input_ids=torch.tensor(ids),
            positions=torch.arange(len(ids)),
            out_cache_loc=self.slots[: len(ids)],
            extend_num_tokens=len(ids),
            extend_seq_lens=count.int(),
            extend_seq_lens_cpu=[len(ids)],
            extend_prefix_lens=torch.zeros(1, dtype=torch.int32),
            extend_prefix_lens_cpu=[0],
            extend_start_loc=torch.zeros(1, dtype=torch.int32),
        )

    @torch.inference_mode()
    def decode(self, token: int, position: int) -> Tensor:
        """Logits behind `token`, [vocabulary]; it can be repeated, a slot is written again."""
        return self._logits(
            ForwardMode.DECODE,
            torch.tensor([position + 1]),
            input_ids=torch.tensor([token]),
            positions=torch.tensor([position]),
            out_cache_loc=self.slots[position : position + 1],
        )

    def _logits(self, mode: ForwardMode, lengths: Tensor, **fields: Any) -> Tensor:
        batch = forward_batch(mode, self.row, lengths, **fields)
        return self.runner.forward(batch).logits_output.next_token_logits[0].float()


def check(runner: Any, prompt: int) -> None:
    """Raises SystemExit unless a step behind `prompt` tokens equals their prefill and one more."""
    ids = torch.randint(0, 250, (prompt + 1,), generator=torch.Generator().manual_seed(1)).tolist()
    request = Request(runner, prompt + 1)
    whole = request.prefill(ids)
    request = Request(runner, prompt + 1)
    request.prefill(ids[:-1])
    error = float((request.decode(ids[-1], prompt) - whole).abs().max())
    if not error < TOLERANCE:
        raise SystemExit(
            f"decode step: expected a prefill's logits within {TOLERANCE}, found {error}"
        )


def _buffers(pool: Any) -> list[list[Tensor]]:
    """The buffers of each layer."""
    if isinstance(pool, dsv4_pool.Dsv4TokenPool):
        return [list(rows.values()) for rows in pool.rows]
    return [list(pair) for pair in zip(pool.k_buffer, pool.v_buffer, strict=True)]


def memory(runner: Any) -> list[dict[str, Any]]:
    """Bytes per token of each layer: those the pool holds, and those of the formula.

    Raises:
        SystemExit: they differ.
    """
    pool = runner.token_to_kv_pool
    rows, dtype, page = pool.size + pool.page_size, pool.store_dtype, pool.page_size
    found = []
    for layer, buffers in enumerate(_buffers(pool)):
        held = sum(buffer.nbytes for buffer in buffers) / rows
        if isinstance(pool, dsv4_pool.Dsv4TokenPool):
            ratio = pool.ratios[layer]
            kept = dsv4_pool.layer_buffers(pool.facts, ratio, dtype, page)
            kind, formula = KINDS[ratio], sum(buffer.bytes_per_token for buffer in kept)
        else:
            kind, formula = "latent", dsa_pool.bytes_per_token(runner.model.facts, 1, dtype)
        if held != formula:
            raise SystemExit(f"pool, layer {layer}: expected {formula} B a token, found {held}")
        found.append({"layer": layer, "kind": kind, "held": held, "formula": formula})
    return found


def _see_all(runner: Any, tokens: int) -> None:
    """The window of a dense V4 is the context."""
    pool = runner.token_to_kv_pool
    if isinstance(pool, dsv4_pool.Dsv4TokenPool):
        pool.facts = dataclasses.replace(pool.facts, sliding_window=tokens)


def measure(
    subject: Subject, contexts: list[int], repeats: int, threads: int, *, dense: bool
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Milliseconds by section for each context, and the pool's memory."""
    longest = max(*contexts, subject.prompt) + 2
    fields = subject.fields | {"max_position_embeddings": longest + 64}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = subject.write(Path(folder), **fields | (subject.dense if dense else {}))
        room = {"max_total_tokens": longest, "max_running_requests": 1}
        with model_rank(path, "float32", **room, context_length=longest) as runner:
            torch.set_num_threads(threads)
            if dense:
                _see_all(runner, subject.prompt + 1)
            check(runner, subject.prompt)
            for buffer in (b for layer in _buffers(runner.token_to_kv_pool) for b in layer):
                buffer.normal_()
            for context in contexts:
                if dense:
                    _see_all(runner, context + 1)
                rows.append({"context": context} | step(runner, context, repeats))
            return rows, memory(runner)


def step(runner: Any, context: int, repeats: int) -> Row:
    """Milliseconds of one decode step behind `context` tokens, by section: medians."""
    request, found = Request(runner, context + 1), defaultdict(list)
    for turn in range(repeats + 1):
        clock, start = Clock(), time.perf_counter()
        with sections(clock), clock.section("rest"):
            request.decode(7, context)
        whole = time.perf_counter() - start
        for name, seconds in clock.spent.items() if turn else ():
            found[name].append(1e3 * seconds)
        if turn:
            found["step"].append(1e3 * whole)
    return {name: statistics.median(values) for name, values in sorted(found.items())}


def compare(subject: Subject, contexts: list[int], repeats: int, threads: int) -> dict[str, Any]:
    """The model and its dense counterpart, one after the other."""
    sparse, held = measure(subject, contexts, repeats, threads, dense=False)
    dense, dense_held = measure(subject, contexts, repeats, threads, dense=True)
    return {"sparse": sparse, "dense": dense, "memory": held, "dense_memory": dense_held}


def _attention(row: Row) -> float:
    return sum(value for name, value in row.items() if name.startswith("attention"))


def table(found: dict[str, Any]) -> str:
    kinds = [name for name in found["sparse"][0] if name.startswith("attention")]
    head = ["context", *kinds, "indexer", "rest", "step", "dense attention", "dense step"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row, dense in zip(found["sparse"], found["dense"], strict=True):
        values = [*(row[name] for name in (*kinds, "indexer", "rest", "step"))]
        values += [_attention(dense), dense["step"]]
        lines.append(f"| {row['context']:,} | {' | '.join(f'{v:.2f}' for v in values)} |")
    return "\n".join(lines)


def plot(models: dict[str, Any], path: Path) -> None:
    panels = {
        title: (
            [row["context"] for row in found["sparse"]],
            {
                "attention": [_attention(row) for row in found["sparse"]],
                "indexer": [row["indexer"] for row in found["sparse"]],
                "rest": [row["rest"] for row in found["sparse"]],
                "attention of the dense model": [_attention(row) for row in found["dense"]],
            },
        )
        for title, found in models.items()
    }
    over_context(panels, "ms per decode step", path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[2**n for n in range(10, 17)])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("dsa_decode.json"))
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    before, models = os.getloadavg()[0], {}
    for title, subject in SUBJECTS.items():
        found = models[title] = compare(subject, args.contexts, args.repeats, args.threads)
        print(f"{title}, ms per decode step\n\n{table(found)}\n")
        for layer in found["memory"]:
            print(
                f"{title}, layer {layer['layer']} ({layer['kind']}): {layer['held']:.0f} bytes "
                f"per token in the pool, {layer['formula']:.0f} by the formula"
            )
        print()
    result = {"models": models, "threads": args.threads, "environment": environment(before)}
    args.out.write_text(json.dumps(result, indent=1))
    if args.plot:
        plot(models, args.plot)


if __name__ == "__main__":
    main()
