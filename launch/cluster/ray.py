"""@PRESET@: one SGLang server over @NODES@ Ray node(s). Run on the head: `python THIS_FILE`.

Needs a Ray cluster (`ray start --head`, `ray start --address=...`) with @GPUS@ GPUs per node and
SGLang on every node.
"""

import json
import os
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES = @NODES@
GPUS = @GPUS@
PORT = int(os.environ.get("SGLANG_PORT", "30000"))
DIST_PORT = int(os.environ.get("SGLANG_DIST_PORT", "20000"))
ARGUMENTS = json.loads(r"""@ARGUMENTS_JSON@""")
ENVIRONMENT = json.loads(r"""@ENVIRONMENT_JSON@""")


@ray.remote
def address() -> str:
    return ray.util.get_node_ip_address()


@ray.remote(max_retries=0)
def serve(rank: int, head: str) -> int:
    """One node's part of the server; returns its exit code."""
    node = ["--nnodes", str(NODES), "--node-rank", str(rank)]
    node += ["--dist-init-addr", f"{head}:{DIST_PORT}", "--host", "0.0.0.0", "--port", str(PORT)]
    command = [sys.executable, "-m", "sglang.launch_server", *ARGUMENTS, *node]
    return subprocess.call(command, env={**os.environ, **ENVIRONMENT})


def main() -> int:
    ray.init(address="auto")
    group = placement_group([{"GPU": GPUS, "CPU": 1}] * NODES, strategy="STRICT_SPREAD")
    ray.get(group.ready())

    def on(bundle: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)

    head = ray.get(address.options(num_cpus=0, scheduling_strategy=on(0)).remote())
    print(f"http://{head}:{PORT}", flush=True)
    ranks = [
        serve.options(num_gpus=GPUS, num_cpus=1, scheduling_strategy=on(rank)).remote(rank, head)
        for rank in range(NODES)
    ]
    # The first node that ends, ends the server.
    ended, rest = ray.wait(ranks, num_returns=1)
    for task in rest:
        ray.cancel(task, force=True)
    return ray.get(ended[0])


if __name__ == "__main__":
    sys.exit(main())
