"""Who serves DeepSeek-V4 and V3.2 on which machine, and that a claim brings all it needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.patches import Stage, selected
from sglang_ext.srt.models import (
    cuda_graphs,
    deepseek_v4_setup,
    deepseek_v32_setup,
    norms,
    policy,
)
from sglang_ext.srt.models.claim import Claim
from sglang_ext.srt.models.policy import LIBRARIES, Machine, builtin_refusal, ours
from sglang_ext.tiny_model import deepseek_v4, deepseek_v32
from tests.tiny import save_tokenizer

A100, RTX_40, RTX_30 = (8, 0), (8, 9), (8, 6)
H100, B200, RTX_50 = (9, 0), (10, 0), (12, 0)
# Machine, whether `auto` gives the models to this package, what the reason names.
DECISIONS = [
    (Machine("portable"), True, "need CUDA"),
    (Machine("other"), False, "can run here"),
    (Machine("cuda", A100), True, "capability 9.0, and a GPU here has 8.0"),
    (Machine("cuda", RTX_30), True, "8.6"),
    (Machine("cuda", RTX_40), True, "8.9"),
    (Machine("cuda", (7, 5), LIBRARIES), True, "7.5"),
    *((Machine("cuda", gpu), False, "can run here") for gpu in (H100, B200, RTX_50)),
    *(
        (Machine("cuda", gpu, (library,)), True, library)
        for gpu in (H100, B200, RTX_50)
        for library in LIBRARIES
    ),
]


@pytest.mark.parametrize(("machine", "expected", "words"), DECISIONS, ids=str)
def test_auto_takes_over_where_sglang_cannot_run(
    machine: Machine, expected: bool, words: str
) -> None:
    assert ours("auto", machine) is expected
    assert (builtin_refusal(machine) is not None) is expected
    assert words in policy.reason("auto", machine)


@pytest.mark.parametrize("machine", [machine for machine, _, _ in DECISIONS], ids=str)
def test_always_and_never_do_not_ask_the_machine(machine: Machine) -> None:
    assert ours("always", machine)
    assert not ours("never", machine)


def test_the_weakest_of_several_gpus_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_ext.plugin.wants_portable_cpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (H100, RTX_40)[gpu])
    policy.this_machine.cache_clear()
    try:
        found = policy.this_machine()
    finally:
        policy.this_machine.cache_clear()
    assert (found.device, found.capability) == ("cuda", RTX_40)


_CLAIMS = """
import json, sys
import sglang.srt.server_args
from sglang.srt.plugins import load_plugins
from sglang_ext import patches, plugin
from sglang_ext.patches import Stage
from sglang_ext.srt.models import policy
load_plugins()
stage = patches.selected(portable_cpu=False, stage=Stage.BACKEND)
plugin.wants_portable_cpu = lambda: False
from sglang.srt.configs import model_config
for path, capability in json.loads(sys.argv[1]):
    policy.this_machine = lambda: policy.Machine("cuda", tuple(capability))
    config = model_config.get_config(path, trust_remote_code=False)
    names = [p.name for p in stage if p in patches.applied()]
    runner = "sglang.srt.model_executor.model_runner" in sys.modules
    print(json.dumps([config.architectures, names, runner]))
"""


def test_a_claim_on_cuda_applies_what_the_model_needs(tmp_path: Path) -> None:
    """A process that reads arguments: a model it leaves to SGLang, then one that it claims."""
    left = deepseek_v32.write(tmp_path / "v32", seed=0)
    taken = deepseek_v4.write(tmp_path / "v4", seed=0)
    for path in (left, taken):
        save_tokenizer(path)
    models = json.dumps([(str(left), H100), (str(taken), A100)])
    command = [sys.executable, "-c", _CLAIMS, models]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads(line) for line in done.stdout.splitlines()[-2:])
    assert first == [["DeepseekV32ForCausalLM"], [], False]
    names, applied, runner = second
    assert names == ["SglangExtDeepseekV4ForCausalLM"]
    assert applied == [p.name for p in selected(portable_cpu=False, stage=Stage.BACKEND)]
    assert {"claimed-models-pool", "claimed-models-size", "claimed-models-class"} <= set(applied)
    # The hard case: the stage is applied before what a model rank imports has been imported.
    assert not runner


@pytest.mark.parametrize("claim", [deepseek_v4_setup.CLAIM, deepseek_v32_setup.CLAIM])
def test_widened_experts_are_not_exchanged_on_a_gpu(claim: Claim) -> None:
    (is_set,) = (test for flag, test, _ in claim.refused if flag == "--moe-a2a-backend")
    for device, backend, refused in (
        *(("cuda", "deepep", True), ("cuda", "mooncake", True)),
        *(("cuda", "none", False), ("cuda", None, False), ("cpu", "deepep", False)),
    ):
        assert is_set(SimpleNamespace(device=device, moe_a2a_backend=backend)) is refused


def _arguments(**flags: Any) -> Any:
    """Arguments of a CUDA machine, resolved as far as the graphs."""
    from sglang.srt.arg_groups.cuda_graph_hook import parse_cuda_graph_config
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(model_path="none", device="cuda", **flags)
    parse_cuda_graph_config(arguments)
    return arguments


def test_cuda_graphs_are_switched_off_and_said(caplog: pytest.LogCaptureFixture) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.model_executor.cuda_graph_config import Backend

    arguments = _arguments()
    assert resolving_view(arguments).cuda_graph_config.decode.backend != Backend.DISABLED
    cuda_graphs.switch_off(arguments, "DeepSeek-V4", "test")
    found = resolving_view(arguments).cuda_graph_config
    assert (found.decode.backend, found.prefill.backend) == (Backend.DISABLED, Backend.DISABLED)
    assert "CUDA graphs are off" in caplog.text


def test_cuda_graphs_that_were_asked_for_are_refused() -> None:
    with pytest.raises(ValueError, match=r"backend-decode: expected disabled .* 'full'"):
        cuda_graphs.switch_off(_arguments(cuda_graph_backend_decode="full"), "DeepSeek-V4", "test")
    arguments = _arguments(disable_cuda_graph=True)
    cuda_graphs.switch_off(arguments, "DeepSeek-V4", "test")


def test_float32_norms_avoid_the_16_bit_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "is_cuda", lambda: True)
    norm = norms.rms_norm(6, eps=1e-3)
    assert norm._forward_method == norm.forward_native


@pytest.mark.parametrize("claimed", [True, False])
def test_a_claimed_target_brings_our_speculative_worker(
    monkeypatch: pytest.MonkeyPatch, claimed: bool
) -> None:
    """SGLang's workers on CUDA expect the features and pools of its own model files."""
    from sglang.srt.arg_groups import overrides

    from sglang_ext.srt.models.deepseek_v4_setup import CLAIM
    from sglang_ext.srt.spec import policy as spec_policy

    name = CLAIM.architecture if claimed else CLAIM.official
    model = SimpleNamespace(hf_config=SimpleNamespace(architectures=[name]))
    monkeypatch.setattr(overrides, "model_config_of", lambda _cfg: model)
    assert spec_policy.ours("DSPARK", SimpleNamespace(device="cuda", attn_dp_size=1)) is claimed
