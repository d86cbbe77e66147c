"""The speed table of the README: ratios inside one run on one machine, as JSON and as markdown.

All servers are up at once and take turns prompt set by prompt set, so that a busy moment of the
machine falls on all of them; an idle one sleeps. Nothing is timed before the fp32 servers with and
without speculation have given the same token ids.

    python -m bench.ratios --target T --dspark D --dflash F --prompts math=gsm8k.jsonl \\
        code=mbpp.jsonl chat=mt-bench.jsonl --out ratios.json

A prompt file has one {"turns": [text, ...]} per line; the first turn is used.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers import against, peer, spinning_little
from bench.report import environment, markdown
from bench.serving import Run, Server, close_all

PromptSets = dict[str, list[list[int]]]
CODE_AND_MATH = ("math", "code")


@dataclass(frozen=True)
class Plan:
    """What is measured, and how often."""

    per_set: int
    tokens: int
    repeats: int
    concurrency: tuple[int, ...]
    gate_prompts: int


def note(stage: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {stage}", file=sys.stderr, flush=True)


def read_prompts(target: str, files: Sequence[str], count: int) -> PromptSets:
    """NAME=PATH arguments -> token ids of the first `count` prompts of each, chat template on."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    sets: PromptSets = {}
    for name, path in (item.split("=", 1) for item in files):
        lines = Path(path).read_text().splitlines()[:count]
        texts = [json.loads(line)["turns"][0] for line in lines]
        chats = [[{"role": "user", "content": text}] for text in texts]
        sets[name] = [
            tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False)
            for c in chats
        ]
    return sets


def servers_for(
    args: argparse.Namespace, names: Sequence[str], dtype: str, cache: str
) -> dict[str, Server]:
    """Start the named servers one after another; each measures its speeds while alone."""
    common = ["--model-path", args.target, "--dtype", dtype, "--max-running-requests", "32"]
    pool = args.pool if dtype == "bfloat16" else args.pool // 4
    common += ["--max-total-tokens", str(pool), "--log-level", "warning"]
    # The pool is given; what else happens to the machine's memory meanwhile must not matter.
    common += ["--mem-fraction-static", "0.9"]
    drafts = {"dspark": args.dspark, "dspark_no_scheduler": args.dspark, "dflash": args.dflash}
    servers: dict[str, Server] = {}
    try:
        for offset, name in enumerate(names):
            argv, env = list(common), {"SGLANG_EXT_CACHE": f"{cache}/{name}-{dtype}"}
            if name in drafts:
                algorithm = name.split("_")[0].upper()
                argv += ["--speculative-algorithm", algorithm]
                argv += ["--speculative-draft-model-path", drafts[name]]
            if name == "dspark_no_scheduler":
                env |= {"SGLANG_EXT_SCHEDULER": "off", "SGLANG_EXT_DRAFT_PAYS": "0"}
            if name == "sglang_layers":
                env["SGLANG_EXT_FAST_FORWARD"] = "0"
            servers[name] = Server(args.port + offset, argv, env)
            servers[name].wait()
    except BaseException:
        close_all(servers.values())
        raise
    return servers


def gate(args: argparse.Namespace, prompts: list[list[int]], cache: str) -> None:
    """Raise SystemExit unless every drafting server repeats the plain one's ids in fp32."""
    names = ["none", *(n for n in args.servers if n in ("dspark", "dflash"))]
    servers = servers_for(args, names, "float32", cache)
    try:
        runs = {name: server.run(prompts, 48, 4) for name, server in servers.items()}
    finally:
        close_all(servers.values())
    ids = {name: [r["output_ids"] for r in run.replies] for name, run in runs.items()}
    wrong = [name for name in names if ids[name] != ids["none"]]
    if wrong:
        raise SystemExit(f"fp32 greedy ids: expected those of no speculation, not so: {wrong}")


def median_of(runs: Sequence[Run]) -> float:
    """Tokens per second."""
    return statistics.median(run.tokens / run.seconds for run in runs)


def one_by_one(
    servers: dict[str, Server], sets: PromptSets, plan: Plan
) -> dict[str, dict[str, list[Run]]]:
    """server -> set -> runs at batch 1."""
    runs: dict[str, dict[str, list[Run]]] = {n: {s: [] for s in sets} for n in servers}
    for _, kind in itertools.product(range(plan.repeats), sets):
        for name, server in servers.items():
            runs[name][kind].append(server.run(sets[kind], plan.tokens, 1))
    return runs


def together(
    servers: dict[str, Server], prompts: list[list[int]], plan: Plan
) -> dict[str, dict[int, list[Run]]]:
    """server -> concurrency -> runs."""
    runs: dict[str, dict[int, list[Run]]] = {n: {c: [] for c in plan.concurrency} for n in servers}
    for _, count in itertools.product(range(plan.repeats), plan.concurrency):
        load = list(itertools.islice(itertools.cycle(prompts), max(count, 4)))
        for name, server in servers.items():
            runs[name][count].append(server.run(load, plan.tokens, count))
    return runs


def ratio(ours: Sequence[Run], base: Sequence[Run]) -> float:
    """Median over repeats of tokens/s against the run that took its turn beside it."""
    pairs = zip(ours, base, strict=True)
    return statistics.median((a.tokens / a.seconds) / (b.tokens / b.seconds) for a, b in pairs)


def joined(per_set: dict[str, list[Run]], kinds: Sequence[str]) -> list[Run]:
    """One run per repeat over several sets."""
    rows = zip(*(per_set[kind] for kind in kinds), strict=True)
    return [
        Run(sum(r.seconds for r in row), tuple(x for r in row for x in r.replies)) for row in rows
    ]


def decode_step_ms(server: Server, prompt: list[int], repeats: int) -> float:
    """Time per token of the plain server at batch 1, prefill taken out."""
    times = []
    for _ in range(repeats):
        first = server.run([prompt], 1, 1, ignore_eos=True).seconds
        many = server.run([prompt], 65, 1, ignore_eos=True).seconds
        times.append(1e3 * (many - first) / 64)
    return statistics.median(times)


def against_peers(
    args: argparse.Namespace, servers: dict[str, Server], prompts: list[list[int]], plan: Plan
) -> dict[str, float]:
    """Ratios to HF generate at batch 1 and 16, and to llama.cpp where a GGUF was given."""
    found = {}
    none = {"none": servers["none"]}
    with peer([sys.executable, "-m", "bench.hf_generate", "--model", args.target]) as hf:
        for batch in (1, 16):
            ratios = against(
                hf, none, prompts, batch=batch, tokens=plan.tokens, repeats=plan.repeats
            )
            found[f"no speculation / HF generate, batch {batch}"] = ratios["none"]
    if args.llama:
        beside = {name: servers[name] for name in ("none", "dspark") if name in servers}
        with peer(
            [args.llama_python, "-m", "bench.llama_generate", "--model", args.llama]
        ) as llama:
            ratios_of = {name: [] for name in beside}
            for prompt in prompts[: max(1, plan.per_set)]:
                one = against(llama, beside, [prompt], batch=1, tokens=plan.tokens, repeats=1)
                for name, value in one.items():
                    ratios_of[name].append(value)
        for name, values in ratios_of.items():
            title = "no speculation" if name == "none" else name
            found[f"{title} / llama.cpp f16, batch 1"] = statistics.geometric_mean(values)
    return found


def forward_times(args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.forward", "--model", args.target]
    done = subprocess.run(command, env=spinning_little(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"bench.forward: expected a result, found:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])["ms"]


def measured_times(cache: str, name: str) -> dict[str, Any] | None:
    """The speed grid that the server measured at its own start."""
    files = list(Path(cache, f"{name}-bfloat16", "speed").glob("*.json"))
    return json.loads(files[0].read_text()) if files else None


def round_figures(run: Run, prefill: float, grid: dict[str, Any]) -> dict[str, float]:
    """tau, the ideal speed-up and the share of a round outside the two model calls, batch 1.

    prefill: seconds that the same prompts take for one token each. The grid's times were taken when
    the server started, so the share means something only on a machine as idle as it was then.
    """
    tau = run.tokens / max(run.rounds, 1)
    rows = run.verified_rows / max(run.rounds, 1) or grid["rows"][-1]
    verify = _interpolate(rows, grid["rows"], grid["verify_seconds"][0])
    draft, decode = grid["draft_seconds"][0], grid["verify_seconds"][0][0]
    spent = (run.seconds - prefill) / max(run.rounds, 1)
    return {
        "tau": tau,
        "rows": rows,
        "decode_ms": 1e3 * decode,
        "draft_ms": 1e3 * draft,
        "verify_ms": 1e3 * verify,
        "round_ms": 1e3 * spent,
        "ideal": tau * decode / (verify + draft),
        "outside": max(0.0, 1 - (verify + draft) / spent),
    }


def _interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    if x <= xs[0]:
        return ys[0]
    for (x0, y0), (x1, y1) in itertools.pairwise(zip(xs, ys, strict=True)):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return ys[-1]


def measure(args: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    sets = read_prompts(args.target, args.prompts, plan.per_set)
    mixed = [ids for row in itertools.zip_longest(*sets.values()) for ids in row if ids]
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as cache:
        note("fp32 identity")
        gate(args, mixed[: plan.gate_prompts], cache)
        note("forward times")
        forward = forward_times(args)
        note("servers")
        servers = servers_for(args, args.servers, "bfloat16", cache)
        try:
            for server in servers.values():
                server.run(mixed[:2], 16, 1)
            note("batch 1")
            alone = one_by_one(servers, sets, plan)
            prefill = {
                name: sum(server.run(prompts, 1, 1).seconds for prompts in sets.values())
                for name, server in servers.items()
            }
            note("concurrency")
            crowd = together(servers, mixed, plan)
            step = decode_step_ms(servers["none"], mixed[0], plan.repeats + 2)
            note("HF generate, llama.cpp")
            peers = against_peers(args, servers, mixed, plan)
            grids = {name: measured_times(cache, name) for name in servers}
        finally:
            close_all(servers.values())
    return summary(sets, alone, crowd, prefill, grids, forward, step) | {"ratios_peers": peers}


def summary(
    sets: PromptSets,
    alone: dict[str, dict[str, list[Run]]],
    crowd: dict[str, dict[int, list[Run]]],
    prefill: dict[str, float],
    grids: dict[str, dict[str, Any] | None],
    forward: dict[str, Any],
    step: float,
) -> dict[str, Any]:
    groups = {"all": list(sets), "math and code": [k for k in sets if k in CODE_AND_MATH]}
    groups |= {kind: [kind] for kind in sets}
    result: dict[str, Any] = {"forward_ms": forward, "decode_step_ms": step, "servers": {}}
    for name, per_set in alone.items():
        whole = joined(per_set, list(sets))
        entry: dict[str, Any] = {"tokens_per_second": median_of(whole), "batch_1": {}}
        for group, kinds in groups.items():
            if kinds:
                base = joined(alone["none"], kinds)
                entry["batch_1"][group] = ratio(joined(per_set, kinds), base)
        entry["concurrency"] = {
            count: {
                "tokens_per_second": median_of(runs),
                "ratio": ratio(runs, crowd["none"][count]),
            }
            for count, runs in crowd[name].items()
        }
        grid = grids[name]
        if grid is not None:
            entry["round"] = round_figures(whole[len(whole) // 2], prefill[name], grid)
            entry["of_ideal"] = entry["batch_1"]["all"] / entry["round"]["ideal"]
        result["servers"][name] = entry
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True)
    parser.add_argument("--dspark", required=True)
    parser.add_argument("--dflash", required=True)
    parser.add_argument("--prompts", nargs="+", required=True, metavar="NAME=PATH")
    names = ["none", "dspark", "dspark_no_scheduler", "dflash"]
    parser.add_argument("--servers", nargs="+", default=names, choices=[*names, "sglang_layers"])
    parser.add_argument("--port", type=int, default=33000)
    parser.add_argument("--pool", type=int, default=32_768, help="K/V tokens of each server")
    parser.add_argument("--per-set", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument(
        "--llama", metavar="GGUF", help="f16 weights for llama.cpp (bench.gguf_f16)"
    )
    parser.add_argument("--llama-python", default=sys.executable, help="that has llama_cpp")
    parser.add_argument("--gate-prompts", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("ratios.json"))
    args = parser.parse_args()
    if args.servers[0] != "none":
        parser.error("--servers: expected 'none' first, the base of every ratio")
    plan = Plan(args.per_set, args.tokens, args.repeats, tuple(args.concurrency), args.gate_prompts)
    # So that the servers are closed when the run is ended from outside.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    before = os.getloadavg()[0]
    result = measure(args, plan)
    result["environment"] = environment(before)
    args.out.write_text(json.dumps(result, indent=1))
    print(markdown(result))


if __name__ == "__main__":
    main()
