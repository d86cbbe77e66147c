"""What stands around the server in an emitted file: its nodes and the address it serves at."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Mapping
from contextlib import suppress

from sglang_ext.launcher.compose import NODE, Launch, read_words
from sglang_ext.launcher.errors import ConfigError
from sglang_ext.launcher.paths import PREFIX

PORT = 30000
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
    is_name = re.fullmatch(r"[\w.-]+", found, re.ASCII) is not None
    if not is_name and _ipv6(found) is None:
        raise ConfigError(
            launch.preset.name, "--host", expected="a name or an address", found=found,
            remedy="As in --set host=0.0.0.0.",
        )  # fmt: skip
    return found


def _ipv6(text: str) -> ipaddress.IPv6Address | None:
    with suppress(ValueError):
        # A zone names an interface in any characters.
        return ipaddress.IPv6Address(text) if re.fullmatch(r"[\w.:%-]+", text, re.ASCII) else None
    return None


def url(launch: Launch) -> str:
    """Where this machine reaches the server. Raises ConfigError as `host` does."""
    at = host(launch, "127.0.0.1")
    at = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(at, at)
    if _ipv6(at):
        at = f"[{at.replace('%', '%25')}]"
    return f"http://{at}:{port(launch)}"


def require_free(launch: Launch) -> None:
    """Nothing listens yet where the server will.

    Raises:
        ConfigError: something does, or this machine has no such address.
    """
    name, at = host(launch, "127.0.0.1"), port(launch)

    def error(flag: str, expected: str, cause: OSError) -> ConfigError:
        remedy = f"Use another: --set {flag}={'N' if flag == 'port' else 'ADDRESS'}."
        return ConfigError(
            launch.preset.name, f"--{flag}", expected=expected, found=cause, remedy=remedy
        )

    try:
        family, kind, _, _, address = socket.getaddrinfo(name, at, type=socket.SOCK_STREAM)[0]
    except OSError as cause:
        raise error("host", "a name that this machine knows", cause) from cause
    with socket.socket(family, kind) as probe:
        # As the server will: an address of connections that have just ended is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as cause:
            if cause.errno == errno.EADDRNOTAVAIL:
                raise error("host", "an address of this machine", cause) from cause
            raise error("port", f"a port of {name} that is free", cause) from cause


def require_room(launch: Launch, kind: str, options: Mapping[str, object]) -> None:
    """A file of this kind says all that the user did.

    options: those of NODE that were given as the command's own; where the file is run knows them

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
