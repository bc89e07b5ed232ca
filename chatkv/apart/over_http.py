"""Frames over HTTP, or HTTPS: the answer to a request is one chunked response, a frame a chunk."""

from __future__ import annotations

import http.client
import json
import select
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from chatkv.apart.transport import RemoteGone, RemoteRefused, State
from chatkv.errors import UsageError

STATE_PATH, SAMPLE_PATH, KV_PATH = "/prefill", "/prefill/sample", "/prefill/kv"
# Names where the body is to be written to instead (`over_nixl`).
LANDING_HEADER = "X-Chatkv-Landing"
# What a connection may take at most: who does not even accept one is not worth waiting for.
CONNECT_S = 1.0


@dataclass(frozen=True)
class HttpTransport:
    """A prefill worker at `url`, asked with `token`. Certificates are checked against those that
    the system trusts, and those in the file that SSL_CERT_FILE names."""

    url: str
    token: str | None = None

    def __post_init__(self) -> None:
        with suppress(ValueError):  # of a port, or an address, that is none
            place = urlsplit(self.url)
            if place.scheme in ("http", "https") and place.hostname and place.port != 0:
                return
        raise UsageError(f"--prefill-url {self.url}: give it as http://HOST:PORT or https://…")

    @property
    def name(self) -> str:
        place = urlsplit(self.url)
        return place.netloc.rpartition("@")[2]

    def state(self, timeout_s: float) -> State:
        with self._answer("GET", STATE_PATH, None, timeout_s) as answer:
            try:
                return msgspec.json.decode(answer.read(), type=State)
            except msgspec.MsgspecError:
                raise RemoteRefused("is no prefill worker of this version") from None

    def sample(self, num_bytes: int, timeout_s: float) -> float:
        path = f"{SAMPLE_PATH}?bytes={num_bytes}"
        with self._answer("GET", path, None, timeout_s) as answer:
            began = time.perf_counter()
            found = len(answer.read())
            return found / max(time.perf_counter() - began, 1e-6)

    def ask(
        self, request: bytes, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> HttpStream:
        connection = self._connection(timeout_s)
        try:
            with _as_remote():
                sock, answer = self._asked(connection, "POST", KV_PATH, request, headers)
                return HttpStream(connection, sock, answer)
        except BaseException:
            connection.close()
            raise

    @contextmanager
    def _answer(
        self, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._connection(timeout_s)
        try:
            with _as_remote():
                yield self._asked(connection, method, path, body)[1]
        finally:
            connection.close()

    def _asked(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes | None,
        more: Mapping[str, str] | None = None,
    ) -> tuple[socket.socket, http.client.HTTPResponse]:
        """The answer to a request, whose body is still to come. Raises RemoteRefused."""
        headers = dict(more or {})
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        timeout_s = connection.timeout
        connection.timeout = min(timeout_s or CONNECT_S, CONNECT_S)
        connection.connect()
        sock = connection.sock  # an answer that ends its connection takes it along
        assert sock is not None
        sock.settimeout(timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.request(method, urlsplit(self.url).path.rstrip("/") + path, body, headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RemoteRefused(_reason(answer))
        return sock, answer

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        place = urlsplit(self.url)
        assert place.hostname is not None
        if place.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(
                place.hostname, place.port, timeout=timeout_s, context=context
            )
        return http.client.HTTPConnection(place.hostname, place.port, timeout=timeout_s)


class HttpStream:
    """One response."""

    def __init__(
        self,
        connection: http.client.HTTPConnection,
        sock: socket.socket,
        answer: http.client.HTTPResponse,
    ) -> None:
        self._connection, self._sock, self._answer = connection, sock, answer

    def read_into(self, buffer: memoryview) -> None:
        with _as_remote():
            done = 0
            while done < len(buffer):
                count = self._answer.readinto(buffer[done:])
                if not count:
                    raise RemoteGone("ended before it was done")
                done += count

    def has_ended(self) -> bool:
        """Whether the worker has ended it, where nothing is expected to come but its end."""
        try:
            return bool(select.select([self._sock], [], [], 0)[0])
        except (OSError, ValueError):  # closed here
            return True

    def stop(self) -> None:
        with suppress(OSError):  # it has ended by itself
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.stop()
        with suppress(OSError, http.client.HTTPException):
            self._answer.close()
        self._connection.close()


@contextmanager
def _as_remote() -> Iterator[None]:
    """What can go wrong on the way there, as RemoteGone."""
    try:
        yield
    except TimeoutError:
        raise RemoteGone("does not answer in time") from None
    except ssl.SSLError as error:
        raise RemoteGone(f"cannot be trusted: {error.reason or error}") from None
    except http.client.IncompleteRead:
        raise RemoteGone("ended before it was done") from None
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else None
        raise RemoteGone(f"is away: {said or str(error) or type(error).__name__}") from None


def _reason(answer: http.client.HTTPResponse) -> str:
    """Why a request was refused, in the server's own words."""
    if answer.status == 401:
        return "refuses the token"
    said = answer.read(64 << 10)
    with suppress(ValueError, KeyError, TypeError):
        return f"refuses: {json.loads(said)['error']['message']}"
    return f"answers with status {answer.status}"
