"""Tokens per second of llama.cpp on token id lists from stdin, as JSON lines.

Reads {"prompts": [[id, ...], ...], "tokens": n} per line; answers {"seconds": s, "tokens": n,
"ids": [[id, ...], ...]}. Prompts run one after another (batch 1), each for exactly n new tokens,
greedily. Needs `pip install llama-cpp-python`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from typing import Any

from llama_cpp import Llama


def answer(model: Any, order: dict[str, Any]) -> dict[str, Any]:
    started = time.perf_counter()
    ids = []
    for prompt in order["prompts"]:
        model.reset()
        stream = model.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0)
        ids.append(list(itertools.islice(stream, order["tokens"])))
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "tokens": sum(map(len, ids)), "ids": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="an f16 GGUF, see bench.gguf_f16")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    model = Llama(args.model, n_ctx=2048, n_threads=args.threads, verbose=False)
    for line in sys.stdin:
        print(json.dumps(answer(model, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
