"""The data under `launch/`: models, GPUs, parts, presets and cluster templates.

A preset is a composition: a model of `base/`, a machine (`2x8xh100`: nodes, GPUs per node, a GPU of
`gpus/`), `parts/` that each concern one thing, and its own last word in `flags` and `env`.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from sglang_ext.launcher.errors import ConfigError, nearest
from sglang_ext.launcher.fields import Fields, load_mapping
from sglang_ext.launcher.model_config import ModelConfig

ROOT = Path(__file__).resolve().parents[1] / "launch_data"
POINTS = ("low-latency", "balanced", "max-throughput", "long-context")
STATUSES = ("run-on-this-hardware", "fitted-by-planner", "neither")
# Beyond it nothing here has been thought about, and a search takes minutes.
MOST_GPUS = 1024
FlagValue = str | int | float | bool


@dataclass(frozen=True)
class Draft:
    """A draft that exists for a model.

    path: its repository; empty when the target's own checkpoint carries it
    gamma: tokens it was trained to draft per round
    config: its config.json, as far as sizes need it
    """

    algorithm: str
    path: str
    gamma: int
    config: dict[str, Any]
    source: str


@dataclass(frozen=True)
class Reported:
    """What others found by running a model.

    shares: GPU -> the largest `--mem-fraction-static` that left its kernels room to work
    """

    shares: dict[str, float] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True)
class Model:
    """A model of `launch/base/`.

    path: what `--model-path` gets; config: the official config.json, as far as it is needed
    """

    name: str
    path: str
    config: dict[str, Any]
    drafts: dict[str, Draft]
    source: str
    reported: Reported = Reported()


@dataclass(frozen=True)
class Gpu:
    """One accelerator (or the CPU), all rates per second and per GPU, from `launch/gpus/`.

    memory: bytes a process can use; nvlink and nic: bytes per second in one direction
    """

    name: str
    capability: tuple[int, int]
    memory: float
    hbm: float
    bf16: float
    fp8: float
    nvlink: float
    nic: float
    source: str

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"


@dataclass(frozen=True)
class Hardware:
    """Identical machines: `nodes` of `per_node` GPUs each."""

    name: str
    nodes: int
    per_node: int
    gpu: Gpu

    @property
    def gpus(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True)
class Part:
    """One concern of a launch: its flags and environment, and why they go together."""

    name: str
    about: str
    flags: dict[str, FlagValue]
    env: dict[str, str]


@dataclass(frozen=True)
class Load:
    """The traffic a preset is meant for.

    input_tokens, output_tokens: per request; concurrency: requests at a time
    """

    input_tokens: int
    output_tokens: int
    concurrency: int


@dataclass(frozen=True)
class Preset:
    """What `launch/presets/NAME.yaml` says, not yet composed."""

    name: str
    model: str
    hardware: str
    point: str
    parts: tuple[str, ...]
    flags: dict[str, FlagValue] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    load: Load | None = None
    status: str = "neither"
    source: str = ""


def _is_file(path: Path) -> bool:
    with suppress(OSError, ValueError):  # too long for a name, or a zero byte in it
        return path.is_file()
    return False


def _file(folder: str, name: str, what: str) -> Path:
    path = ROOT / folder / f"{name}.yaml"
    if re.fullmatch(r"[\w.-]+", name) is None or not _is_file(path):
        presets = folder == "presets"
        hint = (
            (why_absent(name) if presets else "")
            or nearest(name, names(folder))
            or ("`sglang-ext launch --list` shows them." if presets else _known(folder))
        )
        raise ConfigError(what, "name", expected=f"a known {what}", found=name, remedy=hint)
    return path


def _known(folder: str) -> str:
    return f"Known: {', '.join(names(folder))}."


def names(folder: str) -> list[str]:
    """The names of all files in one folder of `launch/`."""
    return sorted(path.stem for path in (ROOT / folder).glob("*.yaml"))


def why_absent(name: str) -> str:
    """Why there is no preset MODEL-MACHINE-POINT and what to use; nothing for another name."""
    point = next((point for point in POINTS if name.endswith(f"-{point}")), "")
    rest = name.removesuffix(f"-{point}")
    model_name, _, machine = rest.rpartition("-")
    if not point or model_name not in names("base"):
        return ""
    with suppress(ConfigError):
        hardware(machine)
        reasons = load_mapping(ROOT / "absent.yaml")
        if reason := reasons.get(name, reasons.get(rest)):
            return str(reason).replace("POINT", point)
        plan = f"plan --model {model_name} --hardware {machine} --objective {point}"
        return f"Plan one: `sglang-ext {plan} --preset it.yaml`, then `sglang-ext launch it.yaml`."
    return ""


@cache
def model(name: str) -> Model:
    """A model of `launch/base`, or a directory with a config.json.

    Raises:
        ConfigError: an unknown name or a malformed file.
    """
    directory = Path(name).parent if Path(name).name == "config.json" else Path(name)
    if _is_file(directory / "config.json"):
        return _local_model(directory)
    path = _file("base", name, "model")
    known = ("about", "path", "config", "drafts", "reported", "source")
    f = Fields(load_mapping(path), str(path), known)
    drafts = {key: _draft(key, value, path) for key, value in f.mapping("drafts", {}).items()}
    reported = _reported(f.mapping("reported"), path) if f.has("reported") else Reported()
    return Model(name, f.text("path"), f.mapping("config"), drafts, f.text("source"), reported)


def _reported(raw: dict[str, Any], path: Path) -> Reported:
    f = Fields(raw, f"{path}, reported", ("mem-fraction-static", "source"))
    shares = Fields(f.mapping("mem-fraction-static"), f"{f.where}, mem-fraction-static", None)
    return Reported({gpu: shares.number(gpu) for gpu in shares.raw}, f.text("source"))


def _local_model(directory: Path) -> Model:
    file = directory / "config.json"
    config = ModelConfig(load_mapping(file), str(file))
    drafts = {}
    if "dspark_target_layer_ids" in config:
        gamma = config.get("dspark_block_size", 5)
        drafts["dspark"] = Draft("dspark", "", gamma, {}, "in the checkpoint")
    # A preset of it is read from other folders too.
    where = str(directory.absolute())
    return Model(where, where, config, drafts, str(file))


def _draft(algorithm: str, raw: Any, path: Path) -> Draft:
    known = ("path", "gamma", "config", "source")
    f = Fields(raw, f"{path}, drafts.{algorithm}", known)
    return Draft(
        algorithm,
        f.text("path"),
        f.whole("gamma", at_least=1),
        f.mapping("config", {}),
        f.text("source"),
    )


_RATES = ("hbm", "bf16", "fp8", "nvlink", "nic")


@cache
def gpu(name: str) -> Gpu:
    """Raises ConfigError for an unknown name or a malformed file."""
    path = _file("gpus", name, "GPU")
    f = Fields(load_mapping(path), str(path), ("about", "capability", "memory", *_RATES, "source"))
    major, _, minor = f.text("capability").partition(".")
    rates = {rate: f.number(rate) for rate in _RATES}
    return Gpu(
        name=name,
        capability=(int(major), int(minor)),
        memory=f.number("memory"),
        source=f.text("source"),
        **rates,
    )


def hardware(name: str) -> Hardware:
    """`8xh100`, `2x8xh100` or `cpu`; raises ConfigError for anything else."""
    if name == "cpu":
        return Hardware("cpu", 1, 1, gpu("cpu"))
    match = re.fullmatch(r"(?:(\d{1,9})x)?(\d{1,9})x([a-z]\w*)", name)
    if match is None or "0" in (match[1], match[2]):
        raise ConfigError(
            "hardware",
            "name",
            expected="[NODESx]GPUSxGPU, as in 8xh100 or 2x8xh100, or cpu",
            found=name,
            remedy=f"GPUs: {', '.join(names('gpus'))}.",
        )
    made = Hardware(name, int(match[1] or 1), int(match[2]), gpu(match[3]))
    if made.gpu.is_cpu or made.gpus > MOST_GPUS:
        raise ConfigError(
            "hardware",
            "name",
            expected=f"cpu alone, or up to {MOST_GPUS} GPUs",
            found=name,
            remedy="As in cpu, 8xh100 or 2x8xh100.",
        )
    return made


@cache
def part(name: str) -> Part:
    """Raises ConfigError for an unknown name or a malformed file."""
    path = _file("parts", name, "part")
    f = Fields(load_mapping(path), str(path), ("about", "flags", "env"))
    return Part(name, f.text("about"), _flags(f), _env(f))


def preset(name: str) -> Preset:
    """A shipped preset by name, or one in a file of the user's own (`.yaml`).

    Raises:
        ConfigError: unknown name, or a field that is missing, unknown or of another type.
    """
    given = Path(name)
    is_file = given.suffix in (".yaml", ".yml", ".json")
    path = given if is_file else _file("presets", name, "preset")
    if not path.stem.isprintable():
        raise ConfigError(
            "launch", "PRESET", expected="a file name of printable characters", found=name,
            remedy="It becomes a comment of what --emit writes: rename it.",
        )  # fmt: skip
    return parse_preset(path.stem, load_mapping(path), str(path))


def parse_preset(name: str, raw: dict[str, Any], where: str) -> Preset:
    """A preset from its mapping; `where` is named in errors."""
    known = (
        "model",
        "hardware",
        "point",
        "parts",
        "flags",
        "env",
        "load",
        "status",
        "source",
        "plan",
    )
    f = Fields(raw, where, known)
    load = f.mapping("load", {})
    return Preset(
        name=name,
        model=f.text("model"),
        hardware=f.text("hardware"),
        point=f.one_of("point", POINTS),
        parts=f.names("parts"),
        flags=_flags(f),
        env=_env(f),
        load=_load(load, where) if load else None,
        status=f.one_of("status", STATUSES),
        source=f.text("source"),
    )


def _load(raw: dict[str, Any], where: str) -> Load:
    f = Fields(raw, f"{where}, load", ("input_tokens", "output_tokens", "concurrency"))
    return Load(*(f.whole(n, at_least=1) for n in ("input_tokens", "output_tokens", "concurrency")))


def _flags(f: Fields) -> dict[str, FlagValue]:
    flags = f.mapping("flags", {})
    for name, value in flags.items():
        if not isinstance(name, str) or name.startswith("-") or "_" in name:
            raise f.error("flags", "a long flag without its dashes, as in tp-size", name)
        if not isinstance(value, str | int | float | bool):
            raise f.error(f"flags.{name}", "one value", value)
    return flags


def _env(f: Fields) -> dict[str, str]:
    env = f.mapping("env", {})
    for name, value in env.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise f.error("env", "names of letters, digits and _", name)
        if not isinstance(value, str) or "\0" in value:
            raise f.error(f"env.{name}", "text in quotes, without a NUL", value)
    return env
