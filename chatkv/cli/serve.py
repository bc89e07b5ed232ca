"""`chatkv serve`, `status` and `stop`: the engine's process, which all faces share."""

from __future__ import annotations

from typing import Any

import click

from chatkv.cli.output import Output, count, output_options, size
from chatkv.paths import folders


@click.command()
@click.option("--socket-only", is_flag=True, help="Serve chatkv's own programs, and no others.")
def serve(socket_only: bool) -> None:
    """Be the engine that all of chatkv talks to, until it is stopped or idle for long.

    The other commands start one where they need it. CHATKV_IDLE_S says after how many idle
    seconds it ends [900].
    """
    from chatkv.server.process import serve as run

    if not run(folders()):
        click.echo("chatkv: the engine is running already", err=True)


@click.command()
@output_options
def status(output: Output) -> None:
    """Show what the engine has loaded and is doing."""
    from chatkv.client import engine

    running = engine.find(folders())
    found: dict[str, Any] = running.status if running is not None else {}
    if not output.is_human:
        output.record({"running": running is not None, **found})
        return
    if running is None:
        output.note("no engine is running: `chatkv chat` starts one")
        return
    if not running.is_ours:
        output.note(
            f"an engine of version {found.get('version')} is running: end it, `chatkv stop`"
        )
        return
    output.fields(
        [
            ("process", str(found["pid"])),
            ("memory", size(found["memory_bytes"])),
            ("answering", count(len(found["answering"]))),
            ("open", count(len(found["open_sessions"]))),
        ]
    )
    for model in found["models"]:
        kv = model["kv_tokens"]
        used = kv["total"] - kv["free"]
        output.line(
            f"{model['model']}  {model['dtype']} on {model['device']}, KV of {count(used)} of "
            f"{count(kv['total'])} tokens in memory"
        )


@click.command()
@click.option("--force", is_flag=True, help="Also where something said cannot be saved.")
def stop(force: bool) -> None:
    """End the engine, once what was said and computed is saved."""
    from chatkv.client import engine

    if not engine.stop(folders(), force):
        click.echo("chatkv: no engine is running", err=True)
