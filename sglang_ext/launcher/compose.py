"""A preset and a user's changes, composed into what one server is started with."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from sglang_ext.launcher import catalog
from sglang_ext.launcher.catalog import FlagValue, Hardware, Model, Preset
from sglang_ext.launcher.errors import ConfigError, nearest
from sglang_ext.launcher.fields import load_mapping


@dataclass(frozen=True)
class Launch:
    """Everything that decides what a server does.

    flags: long flag without dashes -> value; True is a bare switch, False leaves the switch out;
        several values of one flag are one text, as `list_words` reads it
    extra: words passed on as they were given after `--`
    """

    preset: Preset
    model: Model
    hardware: Hardware
    flags: dict[str, FlagValue] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    extra: tuple[str, ...] = ()

    def argv(self) -> list[str]:
        """The arguments of `python -m sglang.launch_server`."""
        words: list[str] = []
        for name, value in self.flags.items():
            if value is True:
                words.append(f"--{name}")
            elif value is not False and name in flag_names().lists:
                words += [f"--{name}", *list_words(str(value))]
            elif value is not False:
                words += [f"--{name}", str(value)]
        return words + list(self.extra)

    def effective(self) -> dict[str, FlagValue]:
        """Flags with `extra` counted in, as SGLang's parser would see them: the last one wins."""
        return {**self.flags, **read_words(self.extra)}

    def whole(self, name: str, default: int = 1) -> int:
        """A flag as a whole number, which `compose` has made sure of."""
        return int(self.effective().get(name, default))


# The least value of what the rules reckon with; SGLang's parser takes any whole number.
LEAST = {
    "tp-size": 1,
    "dp-size": 1,
    "pp-size": 1,
    "ep-size": 1,
    "attn-dp-size": 1,
    "attn-cp-size": 1,
    "moe-dp-size": 1,
    "max-running-requests": 1,
    "cuda-graph-max-bs-decode": 1,
    "ep-num-redundant-experts": 0,
    "speculative-num-draft-tokens": 1,
    "speculative-dspark-block-size": 1,
    "port": 1,
    "page-size": 1,
    "stream-interval": 1,
    "chunked-prefill-size": -1,
}
# Said by options of the command, or by what runs an emitted file.
NODE = ("nnodes", "node-rank", "dist-init-addr")


# As SGLang reads it: SI suffixes, and whole numbers of IEC ones.
_COUNT = re.compile(r"(?=.*[1-9])(?:\d+(?:[kMGT]|[KMGT]i)?|\d+\.\d+[kMGT])", re.ASCII)


@dataclass(frozen=True)
class FlagNames:
    """The flags of SGLang 0.5.23 (`launch/flags.yaml`) and spellings that are not.

    lists: those with several values; whole, decimal: those of `values` and `lists` whose values
    are numbers; counts: numbers of tokens; choices: all values that a flag takes
    aliases: second name -> first
    """

    switches: frozenset[str]
    values: frozenset[str]
    lists: frozenset[str]
    whole: frozenset[str]
    decimal: frozenset[str]
    counts: frozenset[str]
    choices: Mapping[str, Sequence[str]]
    aliases: Mapping[str, str]
    renamed: Mapping[str, str]

    @property
    def known(self) -> frozenset[str]:
        return self.switches | self.values | self.lists

    def require(self, name: str, where: str) -> None:
        """Raises ConfigError for a flag that SGLang 0.5.23 lacks or is about to drop."""
        if name in self.renamed:
            raise ConfigError(
                where,
                f"--{name}",
                expected="a flag of SGLang 0.5.23",
                found="another release's spelling",
                remedy=f"Use {self.renamed[name]}.",
            )
        if name not in self.known:
            hint = nearest(name, self.known) or "See `python -m sglang.launch_server --help`."
            raise ConfigError(
                where, f"--{name}", expected="a flag of SGLang 0.5.23", found=name, remedy=hint
            )

    def require_value(self, name: str, value: FlagValue, where: str) -> None:
        """Raises ConfigError for a value that SGLang's parser, or nobody, could use."""

        def error(expected: str, found: object) -> ConfigError:
            remedy = f"Correct --{name}."
            return ConfigError(where, f"--{name}", expected=expected, found=found, remedy=remedy)

        if name in self.switches:
            if not isinstance(value, bool):
                raise error("nothing after it, or true or false in --set", value)
            return
        is_bare = isinstance(value, bool) and name in self.whole | self.decimal
        if value is True or is_bare or not str(value).strip():
            raise error("a value", "none" if value is True else value)
        if name in self.lists:
            try:
                items = list_words(str(value))
            except ValueError as cause:
                raise error(f"words in whole quotes ({cause})", value) from cause
            for item in items:
                self._require_number(name, _number(name, item), error)
            return
        allowed = self.choices.get(name)
        if allowed is not None and value not in allowed:
            raise error(f"one of {', '.join(allowed)}", value)
        if name in self.counts and not _COUNT.fullmatch(str(value)):
            raise error("a whole number above 0, as in 4096, 32k or 4Ki", value)
        self._require_number(name, value, error)

    def _require_number(
        self, name: str, value: FlagValue, error: Callable[[str, object], ConfigError]
    ) -> None:
        number = value if isinstance(value, int | float) else math.nan
        if name in self.whole and number != int_or_nan(number):
            raise error("a whole number", value)
        if name in self.decimal and not math.isfinite(number):
            raise error("a number", value)
        if name in LEAST and number < LEAST[name]:
            raise error(f"a whole number of at least {LEAST[name]}", value)
        if name == "chunked-prefill-size" and number == 0:
            raise error("a whole number above 0, or -1 for prompts in one piece", value)
        if name == "port" and number > 65535:
            raise error("a port up to 65535", value)


def list_words(text: str) -> list[str]:
    """The values of a flag that takes several, as a shell reads them; JSON is one of its own.

    Raises:
        ValueError: a quote without its end.
    """
    return [text] if text.lstrip().startswith("{") else shlex.split(text)


def int_or_nan(number: float) -> float:
    """The number when it is whole, else nan, which equals nothing."""
    return number if isinstance(number, int) and not isinstance(number, bool) else math.nan


@cache
def flag_names() -> FlagNames:
    """Read once from `launch/flags.yaml`."""
    raw = load_mapping(catalog.ROOT / "flags.yaml")
    kinds = ("switches", "values", "lists", "whole", "decimal", "counts")
    sets = {kind: frozenset(raw[kind]) for kind in kinds}
    choices, aliases, renamed = (raw[kind] for kind in ("choices", "aliases", "renamed"))
    return FlagNames(**sets, choices=choices, aliases=aliases, renamed=renamed)


def read_words(words: Iterable[str]) -> dict[str, FlagValue]:
    """Flags in a command line's words under their first names; a list's values quoted and joined.

    Raises:
        ConfigError: a word that belongs to no flag.
    """
    found: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = flag_names().aliases.get(name, name)
            found[name] = _typed(name, value) if equals else True
        elif name:
            found[name] = _joined(name, found[name], word)
        else:
            raise ConfigError(
                "launch", "words after `--`", expected="a flag first, as in --log-level info",
                found=word, remedy="SGLang's server takes no other words.",
            )  # fmt: skip
    return found


def _joined(name: str, so_far: FlagValue, word: str) -> FlagValue:
    if name in flag_names().lists:
        quoted = shlex.quote(word)
        return quoted if so_far is True else f"{so_far} {quoted}"
    return _typed(name, word) if so_far is True else f"{so_far} {word}"


def _typed(name: str, text: str) -> FlagValue:
    """A number where the flag takes one, else the text: `0123` may be a name or a key."""
    return text if name in flag_names().lists else _number(name, text)


def _number(name: str, text: str) -> FlagValue:
    names = flag_names()
    kinds: tuple[type[int] | type[float], ...] = (int, float) if name in names.decimal else ()
    for kind in (int,) if name in names.whole else kinds:
        with suppress(ValueError):
            return kind(text)
    return text


def compose(
    preset: Preset,
    settings: Iterable[str] = (),
    extra: Iterable[str] = (),
    model: Model | None = None,
) -> Launch:
    """Parts in order, then the preset's own flags, then `--set key=value`, then extra words.

    model: the model, when it is not one of `launch/base`

    Raises:
        ConfigError: an unknown part, model, machine or flag; two parts that disagree.
    """
    model = model or catalog.model(preset.model)
    hardware = catalog.hardware(preset.hardware)
    flags: dict[str, FlagValue] = {"model-path": model.path}
    env: dict[str, str] = {}
    owner: dict[str, str] = {}
    for name in preset.parts:
        part = catalog.part(name)
        for key, value in {**part.flags, **part.env}.items():
            _refuse_conflict(preset, key, value, name, owner, {**flags, **env})
            owner[key] = name
        flags |= part.flags
        env |= part.env
    flags |= preset.flags
    env |= preset.env
    changed = _read_settings(settings)
    flags |= {k: v for k, v in changed.items() if not k.isupper()}
    env |= {k: str(v) for k, v in changed.items() if k.isupper()}
    launch = Launch(preset, model, hardware, flags, env, tuple(extra))
    for key, value in launch.effective().items():
        flag_names().require(key, preset.name)
        flag_names().require_value(key, value, preset.name)
    return with_draft(launch)


def _refuse_conflict(
    preset: Preset,
    key: str,
    value: FlagValue,
    part: str,
    owner: Mapping[str, str],
    so_far: Mapping[str, FlagValue],
) -> None:
    settled = key in preset.flags or key in preset.env
    if key in owner and so_far[key] != value and not settled:
        raise ConfigError(
            preset.name,
            f"parts, {key}",
            expected=f"{so_far[key]} as in {owner[key]}",
            found=f"{value} in {part}",
            remedy=f"Drop one part, or set {key} in `flags`.",
        )


def _read_settings(settings: Iterable[str]) -> dict[str, FlagValue]:
    found: dict[str, FlagValue] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ConfigError(
                "--set",
                "setting",
                expected="FLAG=VALUE or VARIABLE=VALUE",
                found=setting,
                remedy="As in --set max-running-requests=64.",
            )
        if key.isupper():
            found[_variable(key, setting)] = value
            continue
        key = key.removeprefix("--").replace("_", "-")
        key = flag_names().aliases.get(key, key)
        is_switched = key in flag_names().switches and value.lower() in ("true", "false")
        found[key] = value.lower() == "true" if is_switched else _typed(key, value)
    return found


def _variable(name: str, setting: str) -> str:
    if re.fullmatch(r"[A-Z_][A-Z0-9_]*", name) is None:
        raise ConfigError(
            "--set", "variable", expected="a name of capitals, digits and _", found=setting,
            remedy="As in --set NCCL_DEBUG=WARN.",
        )  # fmt: skip
    return name


def with_draft(launch: Launch) -> Launch:
    """Adds the model's own draft when speculation is on and none is named.

    Raises:
        ConfigError: the model has no draft for the algorithm.
    """
    flags = launch.effective()
    algorithm = str(flags.get("speculative-algorithm", "")).lower()
    if algorithm not in ("dspark", "dflash") or "speculative-draft-model-path" in flags:
        return launch
    draft = launch.model.drafts.get(algorithm)
    if draft is None:
        known = ", ".join(launch.model.drafts) or "none"
        raise ConfigError(
            launch.preset.name,
            "speculative-draft-model-path",
            expected=f"a {algorithm.upper()} draft for {launch.model.name}",
            found=f"drafts known for it: {known}",
            remedy="Add --set speculative-draft-model-path=PATH, or leave speculation out.",
        )
    if not draft.path:
        return launch
    return replace(launch, flags={**launch.flags, "speculative-draft-model-path": draft.path})


# Stands for the address in a dry run that names none.
PLACE = "HOST:PORT"


def for_node(launch: Launch, nnodes: int, node_rank: int, address: str | None) -> Launch:
    """The same launch as one of several nodes.

    Raises:
        ConfigError: a number of nodes other than the hardware's, no address to meet at, or any of
            them as a flag of the server.
    """
    said = launch.effective()
    for name in NODE:
        if name in said:
            raise ConfigError(
                launch.preset.name, f"--{name}", expected="an option of the command itself",
                found="a flag of the preset, of --set or after `--`",
                remedy=f"Use `sglang-ext launch PRESET --{name} {said[name]}`.",
            )  # fmt: skip
    expected = launch.hardware.nodes
    if nnodes != expected:
        raise ConfigError(
            launch.preset.name,
            "--nnodes",
            expected=f"{expected} for {launch.hardware.name}",
            found=nnodes,
            remedy=f"Start it on {expected} node{'s' if expected > 1 else ''}.",
        )
    if not 0 <= node_rank < nnodes:
        raise ConfigError(
            launch.preset.name,
            "--node-rank",
            expected=f"0 to {nnodes - 1}",
            found=node_rank,
            remedy="Number the nodes from 0.",
        )
    if nnodes == 1:
        if address:
            raise ConfigError(
                launch.preset.name,
                "--dist-init-addr",
                expected="none for one node",
                found=address,
                remedy="Leave it out.",
            )
        return launch
    host, _, port = (address or "").rpartition(":")
    is_host = re.fullmatch(r"[\w.-]+|\[[\w.:%-]+\]", host, re.ASCII) is not None
    is_port = re.fullmatch(r"\d{1,5}", port, re.ASCII) is not None and 0 < int(port) < 65536
    if address != PLACE and not (is_host and is_port):
        raise ConfigError(
            launch.preset.name,
            "--dist-init-addr",
            expected="HOST:PORT of node 0",
            found=address,
            remedy="All nodes name the same address.",
        )
    more: dict[str, FlagValue] = {
        "nnodes": nnodes,
        "node-rank": node_rank,
        "dist-init-addr": str(address),
    }
    return replace(launch, flags={**launch.flags, **more})
