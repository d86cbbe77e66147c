"""SGLang's own resolution of launch arguments for a GPU that is not there.

Run as `python -m tests.adapters.preset_world ORDERS`, ORDERS a JSON file: `gpu` (name, capability,
bytes), `launches` (name, argv, env, nodes) and `plugin`, whether sglang-ext is loaded. Prints one
JSON object: name -> resolved values, or the error. PyTorch is told of eight such GPUs before SGLang
is imported; nothing is allocated.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SHOWN = (
    "tp_size",
    "dp_size",
    "attn_dp_size",
    "attn_cp_size",
    "pp_size",
    "ep_size",
    "moe_a2a_backend",
    "deepep_mode",
    "max_running_requests",
    "speculative_num_draft_tokens",
    "mem_fraction_static",
    "moe_dense_tp_size",
    "enable_dp_lm_head",
    "device",
    "attention_backend",
    "kv_cache_dtype",
    "disaggregation_mode",
    "enable_two_batch_overlap",
    "enable_eplb",
    "ep_num_redundant_experts",
    "cp_strategy",
    "speculative_algorithm",
)


def pretend(gpu: dict[str, Any]) -> None:
    """Make PyTorch report eight GPUs of one kind."""
    import torch

    capability = tuple(gpu["capability"])
    facts = SimpleNamespace(
        name=gpu["name"],
        total_memory=int(gpu["memory"]),
        major=capability[0],
        minor=capability[1],
        multi_processor_count=132,
        gcnArchName="",
    )
    answers = {
        "is_available": True,
        "device_count": 8,
        "get_device_capability": capability,
        "get_device_properties": facts,
        "get_device_name": gpu["name"],
        "current_device": 0,
        "mem_get_info": (facts.total_memory, facts.total_memory),
    }
    for name, value in answers.items():
        setattr(torch.cuda, name, lambda *a, _value=value, **k: _value)
    os.environ["SGLANG_EXT_PLATFORM"] = "off"
    # Set by our platform in a parent that serves on the CPU, and inherited.
    os.environ.pop("SGLANG_USE_CPU_ENGINE", None)
    # SGLang asks nvidia-smi for the memory; the numbers it prints are MiB.
    from sglang_ext.srt.sgl_kernel_torch.install import install

    install()


def resolve(launch: dict[str, Any], mebibytes: float) -> dict[str, Any]:
    """What SGLang makes of one launch."""
    import sglang.srt.arg_groups.memory_hook as memory_hook
    from sglang.srt.arg_groups.validation_hook import check_server_args
    from sglang.srt.layers.moe import utils as moe_utils
    from sglang.srt.runtime_context import create_context, use_context
    from sglang.srt.server_args import prepare_server_args

    memory_hook.get_device_memory_capacity = lambda *a, **k: mebibytes
    # Asks how PyTorch was built.
    moe_utils.is_cuda = lambda: True
    before = dict(os.environ)
    os.environ.update(launch["env"])
    try:
        args = prepare_server_args([*launch["argv"], "--skip-tokenizer-init"])
        args.resolve_once()
        check_server_args(args)
        # A rank's first check after the launcher's, before it loads anything.
        with use_context(create_context(args, role="scheduler")):
            moe_utils.initialize_moe_config()
        resolved = args.resolved_dict()
        return {name: resolved[name] for name in SHOWN}
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        os.environ.clear()
        os.environ.update(before)


def main() -> None:
    orders = json.loads(Path(sys.argv[1]).read_text())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    pretend(orders["gpu"])
    if orders.get("plugin"):
        from sglang.srt.plugins import load_plugins

        load_plugins()
    mebibytes = orders["gpu"]["memory"] / 2**20
    found = {launch["name"]: resolve(launch, mebibytes) for launch in orders["launches"]}
    answers.write(json.dumps(found))
    answers.flush()


if __name__ == "__main__":
    main()
