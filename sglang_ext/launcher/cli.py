"""`sglang-ext launch`: start a preset, or write what a cluster starts."""

from __future__ import annotations

import json
import shlex
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sglang_ext.inputs import InputError, options_but, positive, refuse_without_effect
from sglang_ext.launcher import catalog
from sglang_ext.launcher.compose import NODE, PLACE, Launch, compose, for_node
from sglang_ext.launcher.diagnose import explain
from sglang_ext.launcher.emit import WRITERS
from sglang_ext.launcher.errors import ConfigError, nearest
from sglang_ext.launcher.paths import demo_folder_names, demo_paths, resolve_demo
from sglang_ext.launcher.process import StartError, running
from sglang_ext.launcher.rules import Finding, require
from sglang_ext.launcher.surroundings import host, require_free, require_room, url

_err = Console(stderr=True, highlight=False, soft_wrap=True)


def launch(
    ctx: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="PRESET", help="A preset, or a preset file (.yaml).")
    ] = None,
    extra: Annotated[
        list[str] | None, typer.Argument(help="Further SGLang flags, after `--`.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="FLAG=VALUE (several: FLAG='A B'), or VARIABLE=VALUE in capitals; repeatable.",
        ),
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Print the presets.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON (--list, --dry-run).")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print argv and environment.")] = False,
    emit: Annotated[
        str | None, typer.Option(help=f"Write what a cluster runs: {', '.join(WRITERS)}.")
    ] = None,
    nnodes: Annotated[int | None, typer.Option(min=1, help="Nodes of this server.")] = None,
    node_rank: Annotated[
        int | None, typer.Option(min=0, help="This node's rank, from 0 (the default).")
    ] = None,
    dist_init_addr: Annotated[
        str | None, typer.Option(help="HOST:PORT of node 0, the same on all nodes.")
    ] = None,
    ready_seconds: Annotated[
        float,
        typer.Option(
            callback=positive, help="How long a start of node 0 may take, weights included."
        ),
    ] = 3600,
) -> None:
    """Start a server from a preset and wait until it answers; Ctrl-C ends all of it.

    Exits with 2 for a mistake in the command or a preset, 1 when the server fails.

    Example:

        sglang-ext launch demo-cpu-low-latency --set port=30001 -- --log-level info
    """
    _has_effect(ctx, show_list, emit is not None, dry_run)
    if show_list:
        if name is not None:
            raise InputError(
                "--list",
                expected="no preset beside it",
                found=name,
                remedy="Leave one of them out.",
            )
        _print_list(as_json)
        return
    if name is None:
        raise ConfigError(
            "launch",
            "PRESET",
            expected="the name of a preset",
            found="nothing",
            remedy="`sglang-ext launch --list` shows them.",
        )
    composed = compose(catalog.preset(name), settings or (), extra or ())
    host(composed, "127.0.0.1")
    notes = require(composed)
    if emit is not None:
        write = _writer(emit)
        options = dict(zip(NODE, (nnodes, node_rank, dist_init_addr), strict=True))
        require_room(composed, emit, {k: v for k, v in options.items() if v is not None})
        typer.echo(write(resolve_demo(composed, demo_folder_names)), nl=False)
        return
    on_node = _on_node(composed, nnodes, node_rank or 0, dist_init_addr, dry_run)
    if dry_run:
        _print_dry_run(resolve_demo(on_node, demo_folder_names), notes, as_json)
        return
    # On all nodes: those but the first answer there whether they live.
    require_free(on_node)
    raise typer.Exit(_serve(resolve_demo(on_node, demo_paths), notes, ready_seconds))


def _has_effect(ctx: typer.Context, show_list: bool, emit: bool, dry_run: bool) -> None:
    """Raises InputError for an option that what is asked for would pass over."""
    if show_list:
        refuse_without_effect(ctx, "beside --list", *options_but(ctx, "--list", "--json"))
    elif emit:
        useless = ("--dry-run", "--json", "--ready-seconds")
        refuse_without_effect(ctx, "beside --emit", *useless)
    elif dry_run:
        refuse_without_effect(ctx, "beside --dry-run", "--ready-seconds")
    else:
        refuse_without_effect(ctx, "without --list or --dry-run", "--json")


def _on_node(
    composed: Launch, nnodes: int | None, rank: int, address: str | None, dry_run: bool
) -> Launch:
    if nnodes is None and dry_run and composed.hardware.nodes > 1:
        return for_node(composed, composed.hardware.nodes, rank, address or PLACE)
    return for_node(composed, nnodes or 1, rank, address)


def _writer(emit: str) -> Any:
    if emit not in WRITERS:
        raise ConfigError(
            "launch",
            "--emit",
            expected=f"one of {', '.join(WRITERS)}",
            found=emit,
            remedy=nearest(emit, WRITERS) or "Choose one of them.",
        )
    return WRITERS[emit]


def _print_list(as_json: bool) -> None:
    presets = [catalog.preset(name) for name in catalog.names("presets")]
    if as_json:
        typer.echo(json.dumps([_as_row(p) for p in presets], indent=1))
        return
    table = Table("preset", "model", "hardware", "point", "parts", "status")
    for p in presets:
        table.add_row(p.name, p.model, p.hardware, p.point, " ".join(p.parts), p.status)
    Console(width=None if Console().is_terminal else 160).print(table)


def _as_row(p: catalog.Preset) -> dict[str, Any]:
    return {
        "name": p.name,
        "model": p.model,
        "hardware": p.hardware,
        "point": p.point,
        "parts": list(p.parts),
        "status": p.status,
        "source": p.source,
        "load": vars(p.load) if p.load else None,
    }


def _print_dry_run(launched: Launch, notes: list[Finding], as_json: bool) -> None:
    if as_json:
        shown = {
            "argv": launched.argv(),
            "env": launched.env,
            "notes": [str(note) for note in notes],
            "status": launched.preset.status,
            "source": launched.preset.source,
        }
        typer.echo(json.dumps(shown, indent=1))
        return
    for key, value in launched.env.items():
        typer.echo(f"{key}={shlex.quote(value)} \\")
    typer.echo(f"python -m sglang.launch_server {shlex.join(launched.argv())}")
    typer.echo(f"# {launched.preset.status}: {launched.preset.source}")
    for note in notes:
        typer.echo(f"# note: {note}")


def _serve(launched: Launch, notes: list[Finding], seconds: float) -> int:
    for note in notes:
        _err.print(f"note: {note}", markup=False)
    log = Path(tempfile.mkstemp(prefix="sglang-ext-launch-", suffix=".log")[1])
    is_head = launched.whole("node-rank", 0) == 0
    at = url(launched)
    try:
        with running(launched, log) as server:
            with _err.status(f"starting (log: {log})") as status:
                server.wait_until_ready(
                    at if is_head else None,
                    seconds,
                    lambda stage: status.update(f"{stage} ({log})"),
                )
            _err.print(f"{at} is up; log: {log}; Ctrl-C ends it" if is_head else f"log: {log}")
            code = server.process.wait()
            cause = explain(server.text())
    except StartError as error:
        _err.print(f"error: {error}", markup=False)
        return 1
    except KeyboardInterrupt:
        _err.print("ended")
        return 0
    _err.print(f"error: {StartError(code, log, cause)}", markup=False)
    return 1
