"""What a user mistypes, over every command and option: one line with the remedy, exit code 2."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from sglang_ext.cli import app

NOBODY = "http://127.0.0.1:9"
PLAN = "plan --model qwen3-8b --hardware 8xh100"
DRY = "launch demo-cpu-balanced --dry-run"
MOE = "launch deepseek-v3.2-2x8xh100-balanced --dry-run"
NODES = "launch deepseek-v3.2-2x8xh100-low-latency --dry-run --nnodes 2"
LOSSLESS = f"lossless --base {NOBODY} --spec {NOBODY}"
GENERATE = "train-draft generate --work w --prompts good.jsonl --target"
TRAIN = "train-draft train --work w --target no/such"
# bench refuses this argument after all others have been looked at.
TAIL = "-- --port 1"

WRONG_NUMBERS = ("0", "-1", "nan", "inf", "x")
# Of whole numbers of at least one.
WRONG_COUNTS = ("0", "-1", "1.5", "x")
WRONG_INPUTS = ("no/such", "binary", "folder")
WRONG_OUTPUTS = ("no/such/x.svg", "folder", "/proc/x.svg", "x" * 5000 + ".svg")

# (command up to the option, option, values, what follows)
CASES: list[tuple[str, str, tuple[str, ...], str]] = [
    ("launch", "", ("demo-cpu-balance", "no/such.yaml", "binary.yaml", "../x", ""), "--dry-run"),
    (DRY, "--set", ("", "x", "=", "a=b", "A B=1", "port=x", "port=0", "port=99999", "host=",
                    "model-path=", "model-path=demo:x", "tp-size=0", "tp-size=1.5", "dp-size=0",
                    "attn-dp-size=0", "chunked-prefill-size=many", "mem-fraction-static=2",
                    "speculative-algorithm=X", "speculative-draft-model-path=demo:x",
                    "disable-radix-cache=3", "enable-dp-attention=true",
                    "cuda-graph-bs-decode=1,2", "cuda-graph-bs-decode= "), ""),
    (MOE, "--set", ("ep-size=0", "attn-cp-size=0", "max-running-requests=0", "deepep-mode=",
                    "ep-num-redundant-experts=-1", "eplb-rebalance-num-iterations=x",
                    "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=x", "NVSHMEM_QP_DEPTH=-1"), ""),
    (DRY, "--", ("word", "--tp-size", "--tp-size=x", "--tensor-parallel-size=2", "--tp=2"), ""),
    (DRY, "--emit", ("", "x"), ""),
    (DRY, "--nnodes", (*WRONG_COUNTS, "2"), ""),
    (DRY, "--node-rank", ("-1", "1", "x"), ""),
    (DRY, "--dist-init-addr", ("h:1",), ""),
    (NODES, "--dist-init-addr", ("", "h", "h:", ":1", "h:x", "h:99999"), ""),
    (DRY, "--ready-seconds", WRONG_NUMBERS, ""),
    ("plan --hardware 8xh100", "--model",
     ("qwen3-8", "no/such", "zeros", "words", "other", "a" * 5000), ""),
    ("plan --model qwen3-8b", "--hardware", ("", "8x", "0xh100", "8xcpu", "8xh1", "9999xh100",
                                             "9" * 5000 + "xh100"), ""),
    ("plan --model qwen3-8b --hardware h100", "--gpus", (*WRONG_COUNTS, "9"), ""),
    *((PLAN, o, (*WRONG_COUNTS, str(10**400)), "") for o in
      ("--input-tokens", "--output-tokens", "--concurrency")),
    (PLAN, "--top", WRONG_COUNTS, ""),
    *((PLAN, o, WRONG_NUMBERS, "") for o in ("--rate", "--ttft", "--tpot")),
    (PLAN, "--imbalance", ("0.9", "nan", "inf", "1e308", "x"), ""),
    (PLAN, "--objective", ("", "fast"), ""),
    (PLAN, "--task", ("", "maths"), ""),
    (f"{PLAN} --acceptance kinds.yaml", "--task", ("", "code", "maths"), ""),
    (f"{PLAN} --acceptance kinds.yaml", "--top", ("1",), ""),
    (PLAN, "--acceptance", (*WRONG_INPUTS, "list.json", "rates.yaml"), ""),
    (PLAN, "--preset", (*WRONG_OUTPUTS, "x.txt"), ""),
    (PLAN, "--picture", (*WRONG_OUTPUTS, "x.png"), ""),
    (PLAN, "--plot", ("x.svg",), ""),
    ("plan --table mtp", "--plot", (*WRONG_OUTPUTS, "x.txt"), ""),
    ("plan", "--table", ("", "mpt"), ""),
    ("plan", "--validate", (*WRONG_INPUTS, "list.json", "empty", "points.jsonl"), ""),
    (f"lossless --spec {NOBODY}", "--base",
     ("", "http://", "ftp://x", "http://[", "☃", NOBODY), ""),
    (f"lossless --base {NOBODY}", "--spec", ("http://[",), ""),
    ("lossless", "--self", ("", "../..", "http://[", "http://h:99999", NOBODY), ""),
    (LOSSLESS, "--key", ("☃", "a\nb"), ""),
    (LOSSLESS, "--api", ("", "grpc", "auto,openai"), ""),
    *((LOSSLESS, o, WRONG_COUNTS, "") for o in
      ("--first-port", "--limit", "--tokens", "--samples", "--depth", "--sampled-prompts")),
    (LOSSLESS, "--concurrency", (*WRONG_COUNTS, "1,"), ""),
    (LOSSLESS, "--bound", ("-1", "nan", "inf", "x"), ""),
    (LOSSLESS, "--seed", ("x",), ""),
    *((LOSSLESS, o, ("", "x"), "") for o in ("--only", "--sets")),
    (LOSSLESS, "--dtype", ("", "x", "float32,bfloat16"), ""),
    (LOSSLESS, "--prompts", (*WRONG_INPUTS, "list.json", "empty", "deep"), ""),
    (f"{LOSSLESS} --report x.md", "--json", (*WRONG_OUTPUTS, "x.md"), ""),
    (LOSSLESS, "--report", (*WRONG_OUTPUTS, "x.pdf"), ""),
    ("lossless", "--", ("--model-path", "--speculative-algorithm=X --port=1"), ""),
    ("bench", "--with", ("", "DSPARK", "=", "X=d"), TAIL),
    *(("bench", o, (*WRONG_COUNTS, "1,"), TAIL) for o in ("--gamma", "--concurrency")),
    ("bench", "--dataset",
     ("", "x", *(f"a={file}" for file in (*WRONG_INPUTS, "empty", "list.json", "deep"))), TAIL),
    ("bench", "--tool", ("", "wrk", "serving,one-batch"), TAIL),
    *(("bench", o, WRONG_COUNTS, TAIL) for o in
      ("--input-tokens", "--output-tokens", "--prompts", "--first-port")),
    ("bench", "--temperature", ("-1", "nan", "inf", "x"), TAIL),
    ("bench", "--out", (*WRONG_OUTPUTS, "list.json", "binary", "deep"), "-- --model-path no/such"),
    ("bench", "--plot", (*WRONG_OUTPUTS, "x.txt"), TAIL),
    ("bench", "--markdown", (*WRONG_OUTPUTS, "x.txt"), TAIL),
    ("demo prepare", "--cache-dir", ("/dev/null/x", "/proc/x"), ""),
    ("demo run", "--cache-dir", ("/dev/null/x",), ""),
    ("demo run --cache-dir /dev/null/x", "--port", ("0", "99999", "x"), ""),
    *((f"tiny-model {m}", "--out", ("binary", "/proc/x", "llama"), "") for m in
      ("deepseek-v4", "deepseek-v3.2")),
    *((f"tiny-model {m} --out o", o, values, "") for m in ("deepseek-v4", "deepseek-v3.2")
      for o, values in (
          ("--layers", WRONG_COUNTS),
          ("--quant", ("", "int4")),
          ("--dtype", ("", "float16")),
          ("--seed", ("-1", "x", "99999999999999999999")),
          ("--set", ("", "x", "=", "bad=1", "hidden_size=0", 'hidden_size="x"', "vocab_size=1",
                     "vocab_size=null", "num_hidden_layers=2", "torch_dtype=1", "seed=1",
                     "index_topk={")))),
    ("tiny-model deepseek-v4 --out o --with-dspark", "--with-mtp", ("",), ""),
    ("calibrate sps", "--grid", (*WRONG_INPUTS, "list.json", "empty", "deep"), ""),
    ("calibrate sps --grid list.json", "--out", WRONG_OUTPUTS, ""),
    ("calibrate sps", "--first-port", WRONG_COUNTS, TAIL),
    ("calibrate sps", "--seconds", WRONG_NUMBERS, TAIL),
    ("calibrate sts", "", ("no/such", "binary", "folder", "list.json", "empty", "deep"), ""),
    ("calibrate sts list.json", "--out", WRONG_OUTPUTS, ""),
    ("calibrate sts list.json --out x.svg", "--plot", (*WRONG_OUTPUTS, "x.txt", "x.svg"), ""),
    ("train-draft prompts", "--prompts", (*WRONG_INPUTS, "list.json"), ""),
    ("train-draft generate --work w --target no/such", "--prompts", WRONG_INPUTS, ""),
    (GENERATE, "", ("no/such", "binary", "folder", "zeros", "other"), ""),
    ("train-draft generate --prompts good.jsonl --target no/such", "--work", ("binary",), ""),
    *((f"{GENERATE} no/such", o, WRONG_COUNTS, "") for o in ("--slots", "--answer", "--threads")),
    (f"{GENERATE} no/such", "--minutes", WRONG_NUMBERS, ""),
    (f"{GENERATE} no/such", "--seed", ("-1", "x"), ""),
    *((TRAIN, o, WRONG_COUNTS, "") for o in
      ("--layers", "--gamma", "--draft-vocab", "--markov-rank", "--texts", "--blocks")),
    *((TRAIN, o, WRONG_NUMBERS, "") for o in ("--minutes", "--rate", "--cache-gb")),
    (TRAIN, "--cross-entropy", ("-1", "2", "nan", "x"), ""),
    (TRAIN, "--threads", WRONG_COUNTS, ""),
    ("train-draft train --work w --target llama", "--drafts", ("", "x"), ""),
    ("train-draft train --work w --target llama", "--start-from", ("no/such",), ""),
    ("train-draft train --target llama", "--work", ("binary",), ""),
    ("train-draft train --work w", "--target", ("no/such", "binary", "zeros"), ""),
    ("train-draft evaluate --work w --target llama", "--draft", WRONG_INPUTS, ""),
    ("train-draft evaluate --target llama --draft llama", "--work", ("no/such", "binary"), ""),
    ("train-draft evaluate --work w --draft llama", "--target", ("no/such", "binary"), ""),
    ("train-draft evaluate --work w --target no/such --draft d", "--threads", WRONG_COUNTS, ""),
    ("train-draft export --target llama --out o", "--work", ("no/such", "binary"), ""),
    ("train-draft export --work w --out o", "--target", ("no/such", "binary"), ""),
    ("train-draft export --work w --target llama", "--out", ("binary",), ""),
    ("train-draft export --work w --out o --target no/such", "--threads", WRONG_COUNTS, ""),
]  # fmt: skip
# Options for which every value is one.
ANY = {"--name", "--help", "--list", "--json", "--dry-run", "--explain", "--together", "--quiet",
       "--additive", "--held-out", "--with-dspark", "--once", "--chat"}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder with files of every wrong kind, and two good ones."""
    root = tmp_path_factory.mktemp("bad")
    (root / "folder").mkdir()
    for name in ("binary", "binary.yaml"):
        (root / name).write_bytes(b"\xff\xfe\x00\x01\xc3")
    (root / "empty").touch()
    (root / "deep").write_text("[" * 100_000)
    (root / "list.json").write_text("[1, 2]")
    (root / "rates.yaml").write_text("conditional: [.nan]")
    (root / "kinds.yaml").write_text("conditional: {math: [0.9], code: [2], chat: x}")
    (root / "good.jsonl").write_text('{"turns": ["a question"]}\n')
    point = {"model": "qwen3-8b", "hardware": "8xh100", "layout": {"tp": 0}, "throughput": 0}
    (root / "points.jsonl").write_text(json.dumps(point))
    qwen: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"]}
    sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
             "num_hidden_layers", "intermediate_size", "max_position_embeddings")  # fmt: skip
    configs = {"zeros": qwen | dict.fromkeys(sizes, 0), "words": qwen | dict.fromkeys(sizes, "x")}
    configs |= {"other": {"architectures": ["Mamba"]}, "llama": qwen | dict.fromkeys(sizes, 1)}
    for name, config in configs.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "tokenizer.json"):
        (root / "llama" / name).touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        yield root


def _words(start: str, option: str, value: str, tail: str) -> list[str]:
    given = [*filter(None, [option]), value]
    if option == "--":
        given = [option, *value.split()]
    if option == "--with-mtp":
        given = [option]
    return [*start.split(), *given, *tail.split()]


@pytest.mark.parametrize(
    ("start", "option", "values", "tail"), CASES, ids=[f"{s} {o}" for s, o, *_ in CASES]
)
def test_bad_input_is_an_error_with_code_2(
    start: str, option: str, values: tuple[str, ...], tail: str
) -> None:
    for value in values:
        words = _words(start, option, value, tail)
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2, (words, result.output, result.exception)
        assert isinstance(result.exception, SystemExit), words
        said = result.output.lower()
        assert "traceback" not in said, words
        assert "expected" in said or "invalid" in said or "usage:" in said, (words, result.output)


@pytest.mark.parametrize("model", ["deepseek-v4", "deepseek-v3.2"])
def test_a_tiny_model_is_written_over_its_own_alone(model: str, tmp_path: Path) -> None:
    out, layers = tmp_path / "out", {"deepseek-v4": 3, "deepseek-v3.2": 1}[model]
    words = ["tiny-model", model, "--out", str(out), "--layers", str(layers)]
    for seed in ("1", "2"):
        result = CliRunner().invoke(app, [*words, "--seed", seed])
        assert result.exit_code == 0, result.output
    config, weights = out / "config.json", out / "model.safetensors"
    written = {file: file.read_bytes() for file in (config, weights)}
    (out / "model-00001.safetensors").write_text("another's")
    assert CliRunner().invoke(app, words).exit_code == 2
    (out / "model-00001.safetensors").unlink()
    config.unlink()
    assert CliRunner().invoke(app, words).exit_code == 2
    for text in ('{"model_type": "llama"}', "{", "[]"):
        config.write_text(text)
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2
        assert f"found {config}. Name another folder" in result.output
        assert config.read_text() == text
    assert weights.read_bytes() == written[weights]


def _options(command: Any, path: str) -> Iterator[tuple[str, str]]:
    for name, sub in getattr(command, "commands", {}).items():
        yield from _options(sub, f"{path} {name}".strip())
    if not hasattr(command, "commands"):
        for parameter in command.params:
            if parameter.opts[0].startswith("--"):
                yield path, parameter.opts[0]


@pytest.mark.parametrize(("command", "option"), list(_options(typer.main.get_command(app), "")))
def test_every_option_is_tried(command: str, option: str) -> None:
    if option in ANY and command != "lossless":
        return
    tried = {o for start, o, *_ in CASES if start == command or start.startswith(f"{command} ")}
    tried |= {word for start, *_ in CASES if start.startswith(f"{command} ")
              for word in start.split() if word.startswith("--")}  # fmt: skip
    assert option in tried | ANY, f"add bad values of {command} {option} to CASES"
