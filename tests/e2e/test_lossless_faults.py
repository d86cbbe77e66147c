"""The checker against real servers: exit code 0 without a fault, 1 with each planted one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_ext.lossless import connected, suite
from sglang_ext.lossless.prompts import as_text, builtin
from sglang_ext.lossless.sampled import SampledPlan
from sglang_ext.lossless.types import Prompt, State
from tests.e2e.faults import FAULTS, VARIABLE
from tests.e2e.servers import Server
from tests.e2e.stand import Stand

pytestmark = pytest.mark.e2e

GAMMA = 5
ROOM = ("--max-running-requests", 64, "--max-total-tokens", 32768)
# Groups of checks of which at least one must see the fault; the others may or may not.
SEEN_BY = {
    "residual skipped": "sampled",
    "bonus of the wrong row": "greedy",
    "Markov bias missing from q": "sampled",
    "drafts not drawn from q": "sampled",
    "penalties ignored": "parameters",
    "penalties of the first row": "parameters",
    "stale KV row": "greedy",
    "admission looks at the token": "sampled",
    "bias on the anchor row only": "parameters",
}
PLAN = suite.Plan(
    tokens=32,
    concurrency=(1, 8),
    noise_prompts=4,
    sampled=SampledPlan(samples=300, depth=4),
    sampled_prompts=4,
    parameter_prompts=4,
    echo_prompts=3,
    echo_each=3,
    repeats=12,
)


def _plain(stand: Stand) -> Server:
    target = stand.checkpoints.target("llama")
    return stand.server(stand.plain_spec(target, "--disable-overlap-schedule", *ROOM))


def _drafting(stand: Stand, fault: str = "") -> Server:
    target = stand.checkpoints.target("llama")
    draft = stand.checkpoints.draft("DSPARK", "vanilla")
    env = {VARIABLE: fault} if fault else {}
    return stand.server(stand.spec("DSPARK", draft, target, GAMMA, *ROOM, env=env))


def _prompts() -> list[Prompt]:
    chosen = builtin(("code", "chat", "languages", "edge"))[::3]
    return [as_text(p) if p.messages else p for p in chosen]


def _check(base: Server, spec: Server, plan: suite.Plan) -> suite.Result:
    opened = connected.both(base.client.url, spec.client.url)
    return suite.run(opened, _prompts(), plan)


def _failed(result: suite.Result) -> set[str]:
    return {o.group for o in result.outcomes if o.state is State.FAIL}


def test_passes_without_a_fault(stand: Stand) -> None:
    result = _check(_plain(stand), _drafting(stand), PLAN)
    assert result.exit_code == 0, [o for o in result.outcomes if o.state is not State.PASS]
    assert {o.group for o in result.outcomes} >= set(suite.GROUPS)
    assert result.drafts is not None
    assert result.drafts.accepted > 0


def test_one_server_both_ways(stand: Stand) -> None:
    server = _drafting(stand)
    plan = replace(PLAN, groups=("greedy", "parameters"), concurrency=(4,))
    result = suite.run(connected.itself(server.client.url), _prompts(), plan)
    assert result.exit_code == 0, [o for o in result.outcomes if o.state is not State.PASS]


def test_over_the_openai_interface(stand: Stand) -> None:
    """The same servers by `/v1` alone, as through a gateway: tokens are known by their text."""
    base, spec = _plain(stand), _drafting(stand)
    opened = connected.both(base.client.url, f"{spec.client.url}/v1", api="openai")
    plan = replace(PLAN, dtype="float32", sampled=SampledPlan(samples=100, depth=3))
    result = suite.run(opened, _prompts(), replace(plan, sampled_prompts=2, echo_prompts=0))
    states = {o.name: o.state for o in result.outcomes}
    assert result.exit_code == 0, [o for o in result.outcomes if o.state is not State.PASS]
    assert result.base.engine == "openai"
    for name in ("greedy, 8 at a time", "sampled, temperature 1", "stop string", "seed"):
        assert states[name] is State.PASS, (name, states)


def test_a_fault_is_seen_over_the_openai_interface(stand: Stand) -> None:
    spec = _drafting(stand, "bonus of the wrong row")
    opened = connected.both(_plain(stand).client.url, spec.client.url, api="openai")
    plan = replace(PLAN, groups=("greedy",), concurrency=(1,), dtype="float32")
    assert suite.run(opened, _prompts(), plan).exit_code == 1


def test_every_fault_is_tried() -> None:
    assert SEEN_BY.keys() == FAULTS.keys()


@pytest.mark.parametrize("fault", SEEN_BY)
def test_finds(stand: Stand, fault: str) -> None:
    plan = replace(PLAN, groups=(SEEN_BY[fault],), concurrency=(1,), echo_prompts=0)
    result = _check(_plain(stand), _drafting(stand, fault), plan)
    assert result.exit_code == 1, [o for o in result.outcomes if o.state is not State.PASS]
    assert _failed(result) == {SEEN_BY[fault]}
