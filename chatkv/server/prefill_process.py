"""The process of a prefill worker: models and their memory, and nothing of any conversation.

It takes no lock and no socket of a home's: any number of them may run beside an engine, over the
same cache or another one. What it leaves there is a note of where it serves (`prefill_notes`).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from chatkv.errors import ChatkvError
from chatkv.paths import Folders
from chatkv.server.listen import Listen
from chatkv.server.ports import listening_on, url_of
from chatkv.server.prefill_notes import noted
from chatkv.session.request import WantedDtype, WantedWeights

log = logging.getLogger("chatkv.server")


def serve_prefill(
    folders: Folders,
    listen: Listen,
    dtype: WantedDtype = "auto",
    weights: WantedWeights = "auto",
    on_listening: Callable[[Sequence[str]], None] = lambda urls: None,
) -> None:
    """Be a prefill worker until SIGTERM or SIGINT. Raises UsageError and ModelError for what
    cannot be served."""
    folders.make()
    with listening_on(listen.host, listen.port, bool(listen.access.tokens)) as ports:
        asyncio.run(_serve(folders, listen, dtype, weights, ports, on_listening))


async def _serve(
    folders: Folders,
    listen: Listen,
    dtype: WantedDtype,
    weights: WantedWeights,
    ports: list[socket.socket],
    on_listening: Callable[[Sequence[str]], None],
) -> None:
    from starlette.applications import Starlette

    from chatkv.server.bounded import bounded
    from chatkv.server.models import Models
    from chatkv.server.offered import Offered
    from chatkv.server.prefill import Prefill
    from chatkv.server.security import Guard
    from chatkv.server.servers import end, http_server
    from chatkv_store.conversations import Conversations

    with ExitStack() as open:
        offered = Offered(folders, listen.models)
        # The store asks them what may be evicted; nothing is written into them.
        conversations = Conversations(folders.conversations, must_open=False)
        open.callback(conversations.close)
        models = Models(folders, conversations, threading.RLock(), lambda runtime: False)
        prefill = Prefill(lambda: models.loaded)
        app = Guard(Starlette(routes=prefill.routes()), listen.access)
        server = http_server(app, bounded(), listen.tls)

        def load() -> None:
            for model in offered.models.values():
                try:
                    models.get(model.spec, dtype, weights=weights)
                except ChatkvError as error:
                    log.error("%s cannot be loaded: %s", model.name, error)

        def stop() -> None:
            end([server])
            prefill.cancel()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        loading = loop.run_in_executor(None, load)
        urls = [url_of(port, listen.tls is not None) for port in ports]
        open.enter_context(noted(folders, urls))
        on_listening(urls)
        try:
            await server.serve(sockets=ports)
        finally:
            await loading
            await loop.run_in_executor(None, prefill.close)
            await loop.run_in_executor(None, models.close)
