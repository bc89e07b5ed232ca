"""The TCP ports on which other programs' clients are served."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from chatkv.errors import UsageError

BACKLOG = 128
# "localhost" is one or the other, and which one comes first differs.
LOOPBACK = ("127.0.0.1", "::1")


@contextmanager
def listening_on(host: str, port: int, has_token: bool) -> Iterator[list[socket.socket]]:
    """Sockets that listen; on both addresses of this machine's own where `host` is one of them.

    Port 0 is any free one. Raises UsageError where the address cannot be had, and where others
    could reach it without a token.
    """
    addresses = _addresses(host)
    if not has_token and not all(ipaddress.ip_address(one).is_loopback for one in addresses):
        raise UsageError(
            f"--host {host}: others can reach this address, so a token is needed: set CHATKV_TOKEN"
        )
    with ExitStack() as open:
        found: list[socket.socket] = []
        for address in addresses:
            is_optional = bool(found)  # IPv6 may be switched off, or another program's
            try:
                one = _bound(address, port)
            except OSError as error:
                if is_optional:
                    continue
                raise UsageError(_cannot(host, port, error)) from None
            open.callback(one.close)
            port = one.getsockname()[1]
            found.append(one)
        yield found


def url_of(listener: socket.socket, is_tls: bool = False) -> str:
    """Where a listening socket is reached."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _addresses(host: str) -> list[str]:
    with suppress(ValueError):
        if not ipaddress.ip_address(host).is_loopback:
            return [host]
        return list(LOOPBACK if host in LOOPBACK else (host,))
    if host == "localhost":
        return list(LOOPBACK)
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise UsageError(f"--host {host}: there is no such address on this machine") from None
    return sorted({str(one[4][0]) for one in found})


def _bound(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind((address, port))
        one.listen(BACKLOG)
    except OSError:
        one.close()
        raise
    return one


def _cannot(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is taken by another program: choose one with --port"
    return f"cannot listen on {host}, port {port}: {error.strerror}"
