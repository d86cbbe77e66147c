"""Prompts: reading, the held-out split, near copies, variations."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from sglang_ext.training.corpus import DEFAULT_WEIGHTS, Corpus
from sglang_ext.training.prompts import (
    STEP_BY_STEP,
    NearCopies,
    Prompt,
    is_held_out,
    kind_of,
    opening,
    read_prompts,
    split,
    vary,
)

WORDS = ["ship", "tax", "apple", "river", "clock", "bread", "piano", "cloud", "stone", "wheel"]


def some_prompts(count: int, kind: str = "chat") -> list[Prompt]:
    rng = random.Random(5)
    return [Prompt(" ".join(rng.choices(WORDS, k=12)), "set", kind) for _ in range(count)]  # type: ignore[arg-type]


def test_read_takes_first_turns_and_names_sets(tmp_path: Path) -> None:
    lines = [{"turns": ["one\u2028line", "second"]}, {"turns": ["two"]}]
    text = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    (tmp_path / "gsm8k.jsonl").write_text(text + "\n", encoding="utf-8")
    (tmp_path / "mbpp.jsonl").write_text('{"turns": ["three"]}\n{"turns": ["three"]}\n')
    assert [(p.text, p.source, p.kind) for p in read_prompts(tmp_path)] == [
        ("one\u2028line", "gsm8k", "math"),
        ("two", "gsm8k", "math"),
        ("three", "mbpp", "code"),
    ]


@pytest.mark.parametrize("line", ['{"turns": []}', '{"turns": [1]}', "[]", "{", '"text"'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text('{"turns": ["fine"]}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"chat\.jsonl:2: expected"):
        read_prompts(file)


def test_nothing_to_read_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="JSONL"):
        read_prompts(tmp_path)


def test_kinds() -> None:
    assert [kind_of(n) for n in ("math500", "gsm8k", "humaneval", "mt-bench")] == [
        "math", "math", "code", "chat",
    ]  # fmt: skip


def test_the_split_is_a_tenth_fixed_by_the_words_alone() -> None:
    prompts = some_prompts(2000)
    held = [p for p in prompts if is_held_out(p.text)]
    assert 150 < len(held) < 250
    assert is_held_out(held[0].text.replace(" ", "  ") + "\n")


def test_no_training_prompt_is_a_near_copy_of_a_held_out_one() -> None:
    held = next(p for p in some_prompts(200) if is_held_out(p.text))
    copies = [Prompt(f"{held.text} {i}", "set", "chat") for i in range(40)]
    train, found = split([held, *copies])
    assert held in found
    assert train == []


def test_near_copies_ignore_numbers_and_the_suffix() -> None:
    question = "Tom has 12 apples and buys 30 more at the market on Monday morning."
    copies = NearCopies([question + STEP_BY_STEP])
    assert copies.contains("Tom has 7 apples and buys 9 more at the market on Monday morning.")
    assert not copies.contains("A train leaves the station at noon and travels west for 3 hours.")
    assert not copies.contains("Explain how tides work." + STEP_BY_STEP)


def test_vary_changes_numbers_and_names_consistently() -> None:
    text = "Alice has 40 pens. Alice gives 12 to Ben, so 40 becomes less." + STEP_BY_STEP
    varied = vary(text, random.Random(1))
    assert varied.endswith(STEP_BY_STEP)
    pattern = r"(\w+) has (\d+) pens\. \1 gives (\d+) to (\w+), so \2 becomes less\."
    match = re.match(pattern, varied)
    assert match, varied
    assert match[1] != match[4]
    assert varied != text


def test_opening_is_a_proper_beginning() -> None:
    text = "Write a function that sorts a list of tuples by their second value."
    for seed in range(20):
        start = opening(text, random.Random(seed))
        assert start
        assert text.startswith(start)
        assert len(start) < len(text)


def test_a_corpus_neither_repeats_nor_leaks() -> None:
    train, held = split(some_prompts(300, "math"))
    corpus = Corpus(train, held, DEFAULT_WEIGHTS, seed=1)
    jobs = corpus.jobs()
    drawn = [next(jobs) for _ in range(800)]
    given = [job.text for job in drawn if not job.write_prompt]
    assert len(given) == len(set(given))
    assert not any(is_held_out(p.text) for p in train)
    assert not corpus.accept(held[0].text)
    share = sum(job.kind == "math" for job in drawn) / len(drawn)
    assert 0.2 < share < 0.6
