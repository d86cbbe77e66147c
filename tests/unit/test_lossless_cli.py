"""`sglang-ext lossless` as a user meets it: verdicts, exit codes, reports, refusals."""

from __future__ import annotations

import html
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from sglang_ext.cli import app
from sglang_ext.lossless import parameters
from sglang_ext.lossless.margins import parted
from sglang_ext.lossless.types import Answer, Sampling, Token
from tests.unit.fake_openai import Change, FakeServer

QUICK = ("--sets", "code,math", "--concurrency", "1,4", "--limit", "6", "--tokens", "12")
DRAWS = ("--sampled-prompts", "2", "--depth", "3", "--samples")


@pytest.fixture(scope="module")
def base() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def _run(*args: object) -> Result:
    return CliRunner().invoke(app, ["lossless", *map(str, args)], env={"COLUMNS": "200"})


def _check(base: FakeServer, change: Change, folder: Path, *args: object) -> tuple[int, dict]:
    """(exit code, JSON) of a run against a server that changes the law."""
    out = folder / "out.json"
    with FakeServer(change) as spec:
        result = _run("--base", base.url, "--spec", spec.url, "--json", out, *QUICK, *args)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(out.read_text())


def _state(found: dict, name: str) -> str:
    return next(o["state"] for o in found["outcomes"] if o["name"] == name)


def test_equal_servers(base: FakeServer, tmp_path: Path) -> None:
    code, found = _check(base, lambda _, logits: logits, tmp_path, *DRAWS, 100)
    assert code == 0, found["statement"]
    assert found["base"]["engine"] == "openai"
    for name in ("greedy, 1 at a time", "sampled, temperature 1", "stop string", "seed"):
        assert _state(found, name) == "pass"
    # What this server ignores, or has no name for, is never counted as passed.
    for name in ("frequency penalty", "top-k 1 is greedy", "logit bias", "regex", "stop token"):
        assert _state(found, name) == "not supported"
        assert name in found["statement"]


@pytest.mark.parametrize("version", ["0.10.2", "0.13.0"])
def test_vllm_is_asked_by_its_own_names(version: str, tmp_path: Path) -> None:
    """Token ids in both directions, its filters, and grammars by what its version calls them."""
    out = tmp_path / "out.json"
    only = ("--only", "greedy,parameters", "--json", out)
    with FakeServer(vllm=version) as base, FakeServer(vllm=version) as spec:
        result = _run("--base", base.url, "--spec", spec.url, *QUICK, *only)
        assert result.exit_code == 0, result.output
        found = json.loads(out.read_text())
        assert (found["base"]["engine"], found["base"]["version"]) == ("vllm", version)
        for name in ("stop token", "logit bias", "top-k 1 is greedy", "min-p 1 is greedy",
                     "regex", "JSON schema", "seed", "log-probabilities"):  # fmt: skip
            assert _state(found, name) == "pass", name
    with FakeServer(vllm=version) as base, FakeServer(vllm=version, grammars=False) as spec:
        only = ("--only", "parameters", "--json", out)
        result = _run("--base", base.url, "--spec", spec.url, *QUICK, *only)
    found = json.loads(out.read_text())
    assert result.exit_code == 1
    assert {_state(found, name) for name in ("regex", "JSON schema")} == {"fail"}


def _swap_top_two(least: float, most: float) -> Change:
    """Exchange the two best words wherever their distance lies in a range."""

    def change(_: Sequence[str], logits: list[float]) -> list[float]:
        first, second = sorted(range(len(logits)), key=logits.__getitem__)[-1:-3:-1]
        if least <= logits[first] - logits[second] <= most:
            logits[first], logits[second] = logits[second], logits[first]
        return logits

    return change


@pytest.mark.parametrize(
    ("left", "right", "shown"),
    [
        ("The capital is Paris, of course.", "The capital is Pisa.",
         ("…capital is Paris, of course.", "…capital is Pisa.")),
        ("a", "", ("a", "")),
        ("x" * 40 + "a" + "b" * 40, "x" * 40, ("…" + "x" * 12 + "a" + "b" * 15 + "…",
                                              "…" + "x" * 12)),
    ],
)  # fmt: skip
def test_both_texts_are_cut_where_they_part(left: str, right: str, shown: tuple[str, str]) -> None:
    assert parted(left, right) == shown


def test_a_near_tie_is_explained_and_a_clear_choice_is_not(
    base: FakeServer, tmp_path: Path
) -> None:
    greedy = ("--only", "greedy", "--bound", "0.4")
    code, found = _check(base, _swap_top_two(0.0, 0.2), tmp_path, *greedy)
    rows = [d for o in found["outcomes"] for d in o["details"].get("divergences", ())]
    assert code == 0
    assert rows
    assert all(d["explained"] and 0 <= d["gap"] <= 0.2 for d in rows)
    assert all(d["gap"] == pytest.approx(d["margin"]) for d in rows)
    # This server's tokens are words, so the texts part where the tokens do.
    for d in rows:
        for side in ("base", "spec"):
            assert d[f"{side}_token"].strip() in d[f"{side}_text"], d
        assert d["base_text"] != d["spec_text"]
    code, found = _check(base, _swap_top_two(1.0, 2.0), tmp_path, *greedy)
    assert code == 1
    assert found["verdict"].startswith("NOT lossless")


def test_another_law_is_found(base: FakeServer, tmp_path: Path) -> None:
    def cooler(said: Sequence[str], logits: list[float]) -> list[float]:
        return [v * 1.4 for v in logits] if said else logits

    code, found = _check(base, cooler, tmp_path, "--only", "sampled", *DRAWS, 300)
    assert code == 1
    confirmed = [t for o in found["outcomes"] for t in o["details"].get("confirmed", ())]
    assert confirmed
    assert all(test["position"] > 1 for test in confirmed)


def test_an_ignored_stop_string_is_found(base: FakeServer) -> None:
    with FakeServer(stops=False) as spec:
        result = _run("--base", base.url, "--spec", spec.url, "--only", "parameters", *QUICK)
    assert result.exit_code == 1
    assert "the stop string" in result.output


@pytest.mark.parametrize("suffix", ["html", "md"])
def test_report(base: FakeServer, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"report.{suffix}"
    with FakeServer(_swap_top_two(1.0, 2.0)) as spec:
        result = _run(
            "--base",
            base.url,
            "--spec",
            spec.url,
            "--only",
            "greedy,sampled",
            *DRAWS,
            50,
            "--report",
            path,
            *QUICK,
        )
    assert result.exit_code == 1
    text = path.read_text()
    assert "NOT lossless" in text
    assert text.count("data:image/png;base64,") == 3
    rows = re.findall(r"UNEXPLAINED", text)
    assert rows
    assert len(re.findall(r"'[^'|<]+' in '[^'|<]+'", html.unescape(text))) >= 2 * len(rows)


@pytest.mark.parametrize("installed", [True, False])
def test_a_report_without_divergences_has_a_plot_or_says_why_not(
    base: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    if not installed:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "report.md"
    with FakeServer() as spec:
        words = ("--base", base.url, "--spec", spec.url, "--only", "greedy", "--report", path)
        assert _run(*words, *QUICK).exit_code == 0
    text = path.read_text()
    assert text.count("![Margins of the base along its answers](data:image/png") == installed
    assert ("no plots: matplotlib is not installed" in text) is not installed


def test_prompts_of_the_user(base: FakeServer, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n{"turns": ["two", "three"]}\n{"text": "four"}\n')
    with FakeServer() as spec:
        result = _run(
            "--base",
            base.url,
            "--spec",
            spec.url,
            "--only",
            "greedy",
            "--tokens",
            8,
            "--prompts",
            file,
        )
    assert result.exit_code == 0, result.output
    assert "3 answers" in result.output


NOBODY = "http://127.0.0.1:9"
REFUSED = {
    "endpoint down": (("--base", NOBODY, "--spec", NOBODY), "expected an answer"),
    "no URL": (("--base", "http://", "--spec", NOBODY), "expected http://HOST:PORT"),
    "other protocol": (("--base", "ftp://a:1", "--spec", NOBODY), "expected http://HOST:PORT"),
    "no servers": ((), "expected --base URL --spec URL"),
    "half of a pair": (("--base", NOBODY), "found a mixture or a part"),
    "two ways": (("--self", NOBODY, "--", "--x"), "found a mixture or a part"),
    "no speculation": (("--", "--model-path", "m"), "expected --speculative-algorithm"),
    "own port": (
        ("--", "--speculative-algorithm", "DSPARK", "--port", "1"),
        "expected no --port",
    ),
    "unknown group": (("--only", "greed", "--self", NOBODY), "--only: expected some of"),
    "unknown set": (("--sets", "poems", "--self", NOBODY), "--sets: expected some of"),
    "concurrency": (("--concurrency", "1,x", "--self", NOBODY), "--concurrency: expected"),
    "two dtypes": (("--dtype", "float32,bfloat16", "--self", NOBODY), "--dtype: expected one of"),
    "one file": (("--json", "a.md", "--report", "a.md", "--self", NOBODY), "another file than"),
    "report": (("--report", "report.pdf", "--self", NOBODY), "ends in .html or .md"),
    "folder": (("--json", "/no/such/folder/x", "--self", NOBODY), "--json: expected a file"),
    "prompts missing": (("--prompts", "/no/such", "--self", NOBODY), "--prompts: expected"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    args, message = REFUSED[name]
    result = _run(*args)
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.startswith("could not test: ")


@pytest.mark.parametrize(
    ("words", "useless"),
    [
        (f"--base {NOBODY} --spec {NOBODY}", "--together / --first-port 2000"),
        (f"--self {NOBODY}", "--api openai / --together / --first-port 2000"),
        (f"--self {NOBODY} --prompts /no/such", "--sets code"),
        (
            f"--self {NOBODY} --only greedy",
            "--samples 99 / --depth 2 / --sampled-prompts 1 / --seed 2",
        ),
        (f"--self {NOBODY} --only sampled", "--seed 2 / --bound 0.1"),
    ],
)
def test_refuses_an_option_without_effect(words: str, useless: str) -> None:
    for option in useless.split(" / "):
        result = _run(*words.split(), *option.split())
        assert result.exit_code == 2
        assert result.output.startswith(f"could not test: {option.split()[0]}: expected none ")


@pytest.mark.parametrize(
    "line",
    ["{", "[1]", '{"prompt": 3}', '{"input_ids": ["a"]}', "{}", '{"messages": [{}]}',
     '{"messages": [{"role": "user", "content": 5}]}', '{"input_ids": [-1]}',
     '{"input_ids": [true]}', f'{{"input_ids": [{10**40}]}}', "[" * 100_000],
)  # fmt: skip
def test_refuses_a_bad_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    result = _run("--prompts", file, "--self", NOBODY)
    assert result.exit_code == 2
    assert "--prompts, line 2: expected a JSON object with prompt" in result.output


def test_refuses_one_server_that_cannot_turn_drafts_off(base: FakeServer) -> None:
    result = _run("--self", base.url)
    assert result.exit_code == 2
    assert "Give --base and --spec" in result.output


def test_refuses_what_is_no_openai_server(base: FakeServer) -> None:
    result = _run("--base", f"{base.url}/other", "--spec", base.url)
    assert result.exit_code == 2
    assert "expected a list of models" in result.output


def test_a_base_that_disagrees_with_itself_ends_undecided(tmp_path: Path) -> None:
    import random

    rng = random.Random(1)

    def unsteady(_: Sequence[str], logits: list[float]) -> list[float]:
        return [v + rng.gauss(0, 1) for v in logits]

    with FakeServer(unsteady) as server:
        code, found = _check(server, lambda _, logits: logits, tmp_path, *DRAWS, 60)
    assert code == 2
    assert _state(found, "base against itself") == "could not test"


def test_an_answer_without_tokens_is_no_crash() -> None:
    free, held = Answer((Token("a", -0.1),), "a", "length", 1), Answer((), "", "stop", 0)
    assert not parameters._is_greedy(free, held, Sampling(4), 0.1)
    assert parameters._is_greedy(held, held, Sampling(4), 0.1)


def test_the_unexpected_is_not_a_difference(
    base: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise IndexError("no\nsuch row")

    monkeypatch.setattr("sglang_ext.lossless.suite.run", broken)
    result = _run("--base", base.url, "--spec", base.url, *QUICK)
    assert result.exit_code == 2
    *_, said = result.output.splitlines()
    assert said == "could not test: unexpected IndexError: no such row"
    assert "Traceback" not in result.output
