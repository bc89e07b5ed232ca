"""`chatkv serve`, `status` and `stop`: the engine's process, which all faces share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from chatkv.cli.device import device_option
from chatkv.cli.options import setting_option, values_in_force
from chatkv.cli.output import Output, count, output_options, size
from chatkv.cli.told import model_lines
from chatkv.errors import UsageError
from chatkv.paths import Folders, folders
from chatkv.session.request import Role

if TYPE_CHECKING:
    from chatkv.server.listen import Tls


@click.command()
@setting_option("serve.host")
@setting_option("serve.port")
@device_option
@setting_option("serve.models", "-m", multiple=True, metavar="MODEL")
@click.option(
    "--token",
    "tokens",
    multiple=True,
    envvar="CHATKV_TOKEN",
    show_envvar=True,
    help="Ask clients for this token; each one's sessions are its own.",
)
@setting_option("serve.allowed-hosts", metavar="NAMES")
@setting_option("serve.allowed-origins", metavar="URLS")
@setting_option("serve.role")
@setting_option("serve.prefill-url", metavar="URL")
@click.option(
    "--prefill-token",
    envvar="CHATKV_PREFILL_TOKEN",
    show_envvar=True,
    help="The token of the prefill worker.",
)
@setting_option("serve.tls-cert", metavar="FILE")
@setting_option("serve.tls-key", metavar="FILE")
@click.option("--socket-only", is_flag=True, help="Serve chatkv's own programs, and no others.")
def serve(
    host: str,
    port: int,
    models: tuple[str, ...],
    tokens: tuple[str, ...],
    allowed_hosts: str | None,
    allowed_origins: str | None,
    role: Role,
    prefill_url: str | None,
    prefill_token: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    socket_only: bool,
) -> None:
    """Serve other programs' clients, which speak OpenAI's, Ollama's or Anthropic's API.

    It is also the engine that all of chatkv talks to: an idle one makes way for it. It listens on
    this machine alone unless --host says otherwise, for which a token is needed.

    Prompts can be computed by another process, here or elsewhere: `chatkv serve --role prefill`
    there, and `chatkv serve --role decode --prefill-url http://THERE:PORT` here.
    """
    from chatkv.server.process import serve as run

    place = folders()
    if socket_only:
        if not run(place):
            click.echo("chatkv: the engine is running already", err=True)
        return
    from chatkv.client import engine
    from chatkv.server.listen import Access, Listen

    # As lists of names, separated by commas.
    hosts, origins = _listed((allowed_hosts or "").lower()), _listed(allowed_origins or "")
    access = Access(_filled(tokens), hosts, origins)
    offered = models or (values_in_force()["model"].value,)
    where, token = _prefill_at(role, prefill_url, prefill_token)
    listen = Listen(host, port, access, offered, _tls(tls_cert, tls_key), where, token)
    if role == "prefill":
        from chatkv.server.prefill_process import serve_prefill

        set_values = values_in_force()
        dtype, weights = set_values["dtype"].value, set_values["weights"].value
        return serve_prefill(place, listen, dtype, weights, _say_where)
    while True:
        _make_way(place)
        if run(place, listen=listen, on_listening=_say_where):
            return
        if engine.find(place) is None:
            time.sleep(0.1)  # another one is just starting, or ending


def _prefill_at(role: Role, url: str | None, token: str | None) -> tuple[str | None, str | None]:
    """The prefill worker's address and token, for a decode worker alone."""
    if role == "decode" and url is None:
        raise UsageError("--role decode needs to know where prompts are computed: --prefill-url")
    if role != "decode":
        if url is not None:
            raise UsageError(f"--prefill-url is for --role decode, not {role}")
        return None, None
    from chatkv.apart.transports import transport_to

    transport_to(url or "", token)  # what makes no sense is said at once
    return url, token


def _tls(cert: str | None, key: str | None) -> Tls | None:
    from chatkv.server.listen import Tls

    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise UsageError("--tls-cert and --tls-key belong together")
    tls = Tls(cert, key)
    tls.check()
    return tls


def _make_way(place: Folders) -> None:
    from chatkv.client import engine

    running = engine.find(place)
    if running is not None and running.status.get("urls"):
        raise UsageError(
            f"chatkv serves at {running.status['urls'][0]} already: `chatkv stop` ends it"
        )
    if running is not None:
        engine.make_way(place)


def _say_where(urls: Sequence[str]) -> None:
    click.echo(f"chatkv: serving at {', '.join(urls)} (Ctrl-C ends it)", err=True)


def _filled(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(value.strip() for value in values if value.strip())


def _listed(names: str) -> tuple[str, ...]:
    return _filled(tuple(names.split(",")))


@click.command()
@output_options
def status(output: Output) -> None:
    """Show what the engine has loaded and is doing, and which prefill workers run here."""
    from chatkv.client import engine
    from chatkv.server import prefill_notes

    running = engine.find(folders())
    workers = prefill_notes.running(folders())
    found: dict[str, Any] = running.status if running is not None else {}
    if not output.is_human:
        told = [{"pid": worker.pid, "urls": worker.urls} for worker in workers]
        output.record({"running": running is not None, **found, "prefill_workers": told})
        return
    for worker in workers:
        output.note(f"{worker.words} is running")
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
            *([("serving at", ", ".join(found["urls"]))] if found["urls"] else []),
            ("process", str(found["pid"])),
            ("memory", size(found["memory_bytes"])),
            ("answering", count(len(found["answering"]))),
            ("open", count(len(found["open_sessions"]))),
        ]
    )
    for model in found["models"]:
        for line in model_lines(model):
            output.line(line)


@click.command()
@click.option("--force", is_flag=True, help="Also where something said cannot be saved.")
@click.option("--all", "also_workers", is_flag=True, help="Also the prefill workers of this home.")
def stop(force: bool, also_workers: bool) -> None:
    """End the engine, once what was said and computed is saved."""
    from chatkv.client import engine
    from chatkv.server import prefill_notes

    if not engine.stop(folders(), force):
        click.echo("chatkv: no engine is running", err=True)
    for worker in prefill_notes.running(folders()):
        if also_workers:
            prefill_notes.end(worker)
        else:
            click.echo(f"chatkv: {worker.words} goes on: `chatkv stop --all` ends it too", err=True)
