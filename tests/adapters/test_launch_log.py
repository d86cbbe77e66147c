"""Progress and causes are read from lines that SGLang 0.5.23 prints."""

from __future__ import annotations

from pathlib import Path

import pytest
import sglang.srt as srt

from sglang_ext.launcher.diagnose import explain
from sglang_ext.launcher.stages import STAGES, stage_of

SOURCE = Path(next(iter(srt.__path__)))
GRAPHS = "model_executor/model_runner_components/cuda_graph_setup.py"
# Stage -> a file of SGLang, its words there, and the line that they print.
STAGE_LINES = {
    "arguments resolved": ("entrypoints/engine.py", 'f"server_args={', "server_args=ServerArgs("),
    "ranks meeting": ("distributed/bootstrap.py", '"Init parallel begin.', "Init parallel begin."),
    "loading weights": (
        "model_executor/model_runner.py", '"Load weight begin. ', "Load weight begin. avail mem=1",
    ),
    "weights loaded": (
        "model_executor/model_runner.py", '"Load weight end. "', "Load weight end. elapsed=0.11 s",
    ),
    "KV cache allocated": (
        "mem_cache/memory_pool.py",
        "{cache_name} {'VA upper bound' if self.post_capture_active else 'is allocated'}. dtype",
        "Full KV Cache is allocated. dtype: torch.bfloat16, #tokens: 64",
    ),
    "capturing graphs": (
        GRAPHS, "Capture {capture_name} CUDA graph begin. ",
        "Capture target prefill CUDA graph begin. backend=full",
    ),
    "ready": (
        "entrypoints/http_server.py", "The server is fired up", "The server is fired up and ready",
    ),
}  # fmt: skip


def test_every_stage_is_one_that_sglang_prints() -> None:
    assert list(STAGE_LINES) == [label for _, label in STAGES]
    log = ""
    for label, (file, words, line) in STAGE_LINES.items():
        assert words in (SOURCE / file).read_text(), label
        log += f"[2026-11-30 17:18:29 TP0] {line}\n"
        assert stage_of(log) == label


@pytest.mark.parametrize(
    ("file", "words", "line"),
    [
        ("entrypoints/engine.py", 'f"(exit code: {proc.exitcode}). "', "(exit code: -9). If"),
        ("entrypoints/engine.py", 'f"terminated with {proc.exitcode}"', "terminated with -9"),
        ("utils/watchdog.py", 'f"with exit code {proc.exitcode}. "', "with exit code -9. Trig"),
    ],
)
def test_a_killed_process_is_known_by_sglangs_words(file: str, words: str, line: str) -> None:
    assert words in (SOURCE / file).read_text()
    cause = explain(f"{line}\nConnection closed by peer\n")
    assert cause is not None
    assert cause.name == "process killed"
