"""One way to lay a model over GPUs, and what it means for `launch/parts`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sglang_ext.core.layout import ParallelLayout
from sglang_ext.launcher import catalog
from sglang_ext.launcher.catalog import FlagValue, Hardware, Model, Preset
from sglang_ext.launcher.compose import Launch, compose
from sglang_ext.launcher.errors import ConfigError
from sglang_ext.launcher.rules import check, heads_divide
from sglang_ext.launcher.rules_experts import (
    LARGEST_DISPATCH,
    all_to_all_spans_the_group,
    deepep_can_carry_the_model,
    experts_divide,
)
from sglang_ext.launcher.view import DEFAULT_DISPATCH, DISPATCH_VARIABLE, View

# Those that speak of a model's sizes alone.
SIZE_RULES = (
    heads_divide,
    deepep_can_carry_the_model,
    all_to_all_spans_the_group,
    experts_divide,
)


@dataclass(frozen=True)
class Layout:
    """A candidate.

    replicas: whole servers; tp: ranks of each stage; dp, cp: attention's groups; ep: expert ranks
    a2a: `none` or `deepep`; algorithm: `` (none), `dspark` or `dflash`; gamma: drafts per round
    tbo, sbo: two-batch and single-batch overlap; redundant: experts of EPLB; pp: pipeline stages
    """

    replicas: int
    tp: int
    dp: int = 1
    cp: int = 1
    ep: int = 1
    a2a: str = "none"
    tbo: bool = False
    algorithm: str = ""
    gamma: int = 0
    redundant: int = 0
    sbo: bool = False
    pp: int = 1

    @property
    def attn_tp(self) -> int:
        return self.tp // (self.dp * self.cp)

    @property
    def moe_tp(self) -> int:
        return self.tp // self.ep

    @property
    def groups(self) -> int:
        """Attention groups over all replicas: each runs its own share of the requests."""
        return self.replicas * self.dp

    def ranks(self, nodes: int) -> ParallelLayout:
        """One replica's ranks."""
        return ParallelLayout(
            tp=self.tp, dp=self.dp, cp=self.cp, ep=self.ep, pp=self.pp, nnodes=nodes
        )

    def layers_of(self, stage: int, layers: int) -> range:
        """Which of a model's layers a pipeline stage holds; the last stages take what is left."""
        each, more = divmod(layers, self.pp)
        first, end = (s * each + max(0, s - self.pp + more) for s in (stage, stage + 1))
        return range(first, end)

    @property
    def name(self) -> str:
        """Short, as in `tp8 dp8 ep8 deepep dspark`."""
        return " ".join(self.parts())

    def parts(self) -> list[str]:
        """The parts of `launch/parts` that make it."""
        parts = [f"tp{self.tp}"]
        parts += [f"pp{self.pp}"] if self.pp > 1 else []
        parts += [f"replicas{self.replicas}"] if self.replicas > 1 else []
        parts += [f"dp{self.dp}"] if self.dp > 1 else []
        parts += [f"cp{self.cp}-prefill"] if self.cp > 1 else []
        parts += [f"ep{self.ep}"] if self.ep > 1 else []
        parts += ["deepep"] if self.a2a == "deepep" else []
        parts += ["dense-tp1"] if self.a2a == "deepep" and self.dp > 1 else []
        parts += ["tbo"] if self.tbo else []
        parts += ["sbo"] if self.sbo else []
        parts += [f"eplb-r{self.redundant}"] if self.redundant else []
        parts += [self.algorithm] if self.algorithm else []
        return parts

    def requests_per_group(self, concurrency: int) -> int:
        return -(-concurrency // self.groups)


def to_preset(
    layout: Layout,
    model: Model,
    machine: Hardware,
    concurrency: int,
    *,
    name: str = "plan",
    flags: dict[str, FlagValue] | None = None,
    point: str = "balanced",
    status: str = "fitted-by-planner",
    source: str = "sglang-ext plan",
    load: catalog.Load | None = None,
) -> Preset:
    """The preset of a layout for `concurrency` requests over all replicas."""
    running = layout.requests_per_group(concurrency) * layout.dp
    chosen: dict[str, FlagValue] = {"max-running-requests": running}
    # One graph for the largest batch a group runs, so that no step falls back to eager.
    chosen["cuda-graph-max-bs-decode"] = layout.requests_per_group(concurrency)
    if layout.redundant:
        # Both parts name a mode, and the load recorder follows this one alone.
        chosen["deepep-mode"] = "normal"
    env: dict[str, str] = {}
    rows = layout.requests_per_group(concurrency) * (layout.gamma + 1)
    if layout.a2a == "deepep" and DEFAULT_DISPATCH < rows <= LARGEST_DISPATCH:
        env[DISPATCH_VARIABLE] = str(rows)
        if 2 * (rows + 1) > 1024:
            env["NVSHMEM_QP_DEPTH"] = str(1 << (2 * rows + 1).bit_length())
    if machine.gpu.is_cpu:
        chosen.pop("cuda-graph-max-bs-decode")
    parts = [*layout.parts(), *(["cpu"] if machine.gpu.is_cpu else [])]
    return Preset(
        name=name,
        model=model.name,
        hardware=machine.name,
        point=point,
        parts=tuple(parts),
        flags=chosen | (flags or {}),
        env=env,
        load=load,
        status=status,
        source=source,
    )


def refusals(launch: Launch) -> list[str]:
    """The rules that a launch breaks, each with its reason."""
    return [str(finding) for finding in check(launch) if finding.level == "error"]


def candidates(
    model: Model, machine: Hardware, experts: int, *, long_context: bool
) -> Iterator[Layout]:
    """Every layout worth a look, legal or not.

    long_context: also context parallelism over a whole server
    """
    yield from _with_stages(machine, experts)
    for replicas in _divisors(machine.gpus):
        if replicas > 1 and machine.nodes > 1:
            continue
        tp = machine.gpus // replicas
        for dp in _divisors(tp) if replicas == 1 else [1]:
            for cp in {1, tp} if long_context and tp in (4, 8) and dp == 1 else {1}:
                yield from _with_experts(model, replicas, tp, dp, cp, experts)


STAGES = (2, 4, 8)
REDUNDANT = 32  # of `launch/parts/eplb-r32.yaml`


def _with_stages(machine: Hardware, experts: int) -> Iterator[Layout]:
    """Pipeline stages; SGLang neither drafts nor dispatches over them, and no group spans them."""
    for pp in STAGES:
        if machine.gpus % pp == 0:
            tp = machine.gpus // pp
            yield Layout(1, tp, pp=pp)
            if experts and tp > 1:
                yield Layout(1, tp, ep=tp, pp=pp)


def _with_experts(
    model: Model, replicas: int, tp: int, dp: int, cp: int, experts: int
) -> Iterator[Layout]:
    plain = Layout(replicas, tp, dp, cp)
    exchanges = [plain]
    if experts and tp > 1:
        spread = replace(plain, ep=tp)
        deepep = replace(spread, a2a="deepep")
        exchanges += [spread, deepep, replace(deepep, tbo=True), replace(deepep, sbo=True)]
        exchanges += [replace(deepep, redundant=REDUNDANT)]
    for layout in exchanges:
        yield layout
        for algorithm, draft in model.drafts.items():
            yield replace(layout, algorithm=algorithm, gamma=draft.gamma)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def breaks(layout: Layout, model: Model, machine: Hardware) -> list[str]:
    """Why the model cannot be laid out so, whatever the machine's other GPUs do."""
    flags: dict[str, FlagValue] = {
        "tp-size": layout.tp, "attn-dp-size": layout.dp, "attn-cp-size": layout.cp,
        "ep-size": layout.ep, "pp-size": layout.pp, "moe-a2a-backend": layout.a2a,
        "ep-num-redundant-experts": layout.redundant,
    }  # fmt: skip
    preset = Preset(layout.name, model.name, machine.name, "balanced", ())
    view = View(Launch(preset, model, machine, flags))
    return [f"{why} {do}" for rule in SIZE_RULES for why, do in rule(view)]


def compose_layout(
    layout: Layout, model: Model, machine: Hardware, concurrency: int
) -> tuple[Launch | None, list[str]]:
    """The launch of a layout, or None and why there is none."""
    try:
        launch = compose(to_preset(layout, model, machine, concurrency), model=model)
    except ConfigError as error:
        return None, [str(error)]
    broken = refusals(launch)
    return (None, broken) if broken else (launch, [])
