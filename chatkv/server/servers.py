"""One HTTP server of this process, as uvicorn runs it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from chatkv.server.listen import Tls

if TYPE_CHECKING:
    from starlette.types import ASGIApp

# Beyond this many at once, who comes is told to try again; each holds a thread while it answers.
MAX_CONNECTIONS = 256


class Server(uvicorn.Server):
    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()  # they are ours: an answer is to stop at once, without a grace


def http_server(
    app: ASGIApp, protocol: type[H11Protocol] = H11Protocol, tls: Tls | None = None
) -> Server:
    """A server for sockets that listen already; over TLS where there is a certificate."""
    return Server(
        uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=5,
            limit_concurrency=MAX_CONNECTIONS,
            server_header=False,
            ssl_certfile=tls.cert_file if tls is not None else None,
            ssl_keyfile=tls.key_file if tls is not None else None,
        )
    )


def end(servers: Sequence[Server]) -> None:
    """Ask them to end; what they are answering is for others to stop."""
    for server in servers:
        server.should_exit = True
