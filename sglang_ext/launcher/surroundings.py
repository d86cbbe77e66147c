"""What stands around the server in an emitted file: its nodes and the address it serves at."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sglang_ext.launcher.compose import Launch, read_words
from sglang_ext.launcher.errors import ConfigError
from sglang_ext.launcher.paths import PREFIX

PORT = 30000
# Known only where the file is run, so these never stand in it.
NODE = ("nnodes", "node-rank", "dist-init-addr")
ADDRESS = ("host", "port")


def arguments(launch: Launch) -> list[str]:
    """The server's arguments without nodes and address, which the file's template adds."""
    kept = {k: v for k, v in launch.flags.items() if k not in NODE + ADDRESS}
    return Launch(launch.preset, launch.model, launch.hardware, kept, {}, launch.extra).argv()


def port(launch: Launch) -> int:
    """Where the server is to listen unless the file's user says otherwise."""
    return launch.whole("port", PORT)


def host(launch: Launch, default: str) -> str:
    """The name or address to listen on.

    Raises:
        ConfigError: it has characters of neither, which a script would read as its own.
    """
    found = str(launch.effective().get("host", default))
    if re.fullmatch(r"[\w.:%-]+", found, re.ASCII) is None:
        raise ConfigError(
            launch.preset.name, "--host", expected="a name or an address", found=found,
            remedy="As in --set host=0.0.0.0.",
        )  # fmt: skip
    return found


def require_room(launch: Launch, kind: str, options: Mapping[str, object]) -> None:
    """A file of this kind says all that the user did.

    options: those of NODE that were given as the command's own options

    Raises:
        ConfigError: it has no place for something; how to say it instead.
    """

    def error(flag: str, expected: str, found: object, remedy: str) -> ConfigError:
        return ConfigError(
            launch.preset.name, f"--{flag}", expected=expected, found=found, remedy=remedy
        )

    said = {**launch.effective(), **options}
    for name in NODE:
        if name in said:
            raise error(
                name,
                "none with --emit",
                said[name],
                f"Leave it out: {launch.hardware.name} says how many nodes there are, and what "
                "runs the file gives each its rank and the address.",
            )
    given = read_words(launch.extra)
    for name in ADDRESS:
        if name in given:
            remedy = f"Use --set {name}={given[name]}."
            raise error(name, "none after `--` with --emit", given[name], remedy)
    for name, value in launch.flags.items():
        if kind == "k8s-lws" and str(value).startswith(PREFIX):
            remedy = f"Use --set {name}=REPOSITORY, or a preset of another model."
            raise error(name, "a model that a pod can fetch", value, remedy)
