"""Which transport an address stands for."""

from __future__ import annotations

from chatkv.apart.over_http import HttpTransport
from chatkv.apart.transport import Transport

NIXL = "nixl+"


def transport_to(url: str, token: str | None = None) -> Transport:
    """To the prefill worker at http://HOST:PORT or https://HOST:PORT; with "nixl+" in front, KV
    comes by nixl. Raises UsageError."""
    http = HttpTransport(url.removeprefix(NIXL), token)
    if not url.startswith(NIXL):
        return http
    from chatkv.apart.over_nixl import NixlTransport

    return NixlTransport(http)
