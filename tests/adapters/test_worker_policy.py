"""Whose worker runs on CUDA: ours where SGLang's own refuses, by SGLang's own resolution."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.srt.spec.policy import ALGORITHMS
from tests.tiny import make_draft, make_target

ROOT = Path(__file__).parents[2]
H200 = {"name": "h200", "capability": [9, 0], "memory": 150.1e9}
DP2 = ("--tp-size", "2", "--attn-dp-size", "2", "--enable-dp-lm-head")
DEEPEP = ("--moe-a2a-backend", "deepep")
CP = ("--tp-size", "4", "--attn-dp-size", "2", "--attn-cp-size", "2", "--enable-dp-lm-head")
LAYOUTS = {
    "deepep": (*DP2, *DEEPEP),
    "deepep with cp": (*CP, *DEEPEP, "--enable-prefill-cp", "--cp-strategy", "zigzag"),
    "one rank": (),
}
# With the draft inside the checkpoint; the last word is SGLANG_EXT_SPEC.
V4_LAYOUTS = {
    "dp2 always": DP2,
    "dp2 deepep auto": (*DP2, *DEEPEP),
    "dp2 deepep never": (*DP2, *DEEPEP),
}
# SGLang's own worker refuses these, and not the others.
REFUSED = {("DSPARK", "deepep"), ("DSPARK", "deepep with cp"), ("DFLASH", "deepep with cp")}


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """ "algorithm layout policy" -> what SGLang makes of it on two pretended GPUs."""
    folder = tmp_path_factory.mktemp("policy")
    target = make_target(folder / "target", "qwen3_moe")
    launches = []
    for algorithm in ALGORITHMS:
        draft = make_draft(folder / algorithm, algorithm, target)
        base = ["--model-path", str(target), "--speculative-algorithm", algorithm]
        for name, flags in LAYOUTS.items():
            argv = [*base, "--speculative-draft-model-path", str(draft), *flags]
            for choice in ("auto", "never"):
                env = {"SGLANG_EXT_SPEC": choice}
                one = f"{algorithm} {name} {choice}"
                launches.append({"name": one, "argv": argv, "env": env})
    # As SGLang serves it; what would claim it is not there to be found missing.
    v4 = make_target(folder / "v4", "deepseek_v4")
    base = ["--model-path", str(v4), "--speculative-algorithm", "DSPARK"]
    for name, flags in V4_LAYOUTS.items():
        env = {"SGLANG_EXT_SPEC": name.split()[-1], "SGLANG_EXT_MODELS": "never"}
        launches.append({"name": f"v4 {name}", "argv": [*base, *flags], "env": env})
    v32 = make_target(folder / "v32", "deepseek_v32")
    argv = ["--model-path", str(v32), "--speculative-algorithm", "DSPARK"]
    env = {"SGLANG_EXT_SPEC": "never", "SGLANG_EXT_MODELS": "always"}
    launches.append({"name": "claimed", "argv": argv, "env": env})
    orders = folder / "orders.json"
    orders.write_text(json.dumps({"gpu": H200, "launches": launches, "plugin": True}))
    done = subprocess.run(
        [sys.executable, "-m", "tests.adapters.preset_world", str(orders)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_ours_takes_over_what_sglang_refuses(
    resolved: dict[str, Any], algorithm: str, name: str
) -> None:
    found = {choice: resolved[f"{algorithm} {name} {choice}"] for choice in ("auto", "never")}
    refused = (algorithm, name) in REFUSED
    assert ("error" in found["never"]) is refused, found
    assert "error" not in found["auto"], found
    assert found["auto"]["device"] == "cuda"
    if refused:
        assert found["auto"]["moe_a2a_backend"] == "deepep"
        assert found["auto"]["enable_dp_lm_head"] is True
        assert found["auto"]["speculative_num_draft_tokens"] == 5


def test_a_claimed_model_needs_our_worker(resolved: dict[str, Any]) -> None:
    error = resolved["claimed"]["error"]
    for word in ("SGLANG_EXT_SPEC", "DeepSeek-V3.2", "expected", "never"):
        assert word in error


def test_v4s_own_draft_is_ours_but_over_an_exchange(resolved: dict[str, Any]) -> None:
    found = resolved["v4 dp2 always"]
    assert "error" not in found, found
    assert found["enable_dp_lm_head"] is True
    for word in ("--moe-a2a-backend", "expected none", "found deepep", "widened"):
        assert word in resolved["v4 dp2 deepep auto"]["error"]
    assert "megamoe" in resolved["v4 dp2 deepep never"]["error"]
