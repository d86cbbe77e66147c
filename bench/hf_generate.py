"""Tokens per second of HF transformers' `generate` on token id lists from stdin, as JSON lines.

Reads {"prompts": [[id, ...], ...], "tokens": n} per line; answers {"seconds": s, "tokens": n}.
Every prompt gets exactly n new tokens, greedily, all prompts in one left-padded batch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def pad_left(prompts: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask), both [prompts, longest]."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def answer(model: Any, order: dict[str, Any]) -> dict[str, float]:
    ids, mask = pad_left(order["prompts"], 0)
    count = order["tokens"]
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            pad_token_id=0,
        )
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "tokens": (out.shape[1] - ids.shape[1]) * len(ids)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    for line in sys.stdin:
        print(json.dumps(answer(model, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
