"""How a decode worker reaches a prefill worker: the one interface of all transports.

A transport carries requests there and bytes back. It knows nothing of KV: what a frame is and
whether it is sound is for `wire` and `receive` to say, so a transport can be as plain as a pipe.
Bytes arrive in the buffer that the caller gives, so that one which writes memory from afar (RDMA)
need not copy either.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from chatkv.apart.wire import Model


class RemoteError(Exception):
    """The prefill worker cannot be had; `str()` says why, in words that follow "it"."""


class RemoteGone(RemoteError):
    """It does not answer, or has stopped to."""


class RemoteRefused(RemoteError):
    """It answers, and will not do this."""


class Rates(msgspec.Struct, frozen=True):
    """What prefill takes there, as it has measured: see `restore.cost`."""

    prefill_fixed_s: float
    prefill_s_per_token: float
    prefill_s_per_token_pair: float


class Offered(msgspec.Struct, frozen=True):
    """A model that the prefill worker has loaded. context: the longest sequence that fits; store:
    what it has open (`same_store`)."""

    name: str
    model: Model
    context: int
    rates: Rates
    store: str | None = None


class State(msgspec.Struct, frozen=True):
    """What a prefill worker says of itself. queue_s: how long a request would wait now."""

    version: int
    models: list[Offered]
    queue_s: float
    role: str = "prefill"


class Stream(Protocol):
    """The bytes of one answer."""

    def read_into(self, buffer: memoryview) -> None:
        """Fill the buffer. Raises RemoteGone where no more comes."""

    def stop(self) -> None:
        """End it now, also under a `read_into` of another thread, which raises then."""

    def close(self) -> None:
        """Give up what it holds. The other end notices that nobody listens any more."""


class Transport(Protocol):
    """One prefill worker. Safe to use from several threads."""

    @property
    def name(self) -> str:
        """What people call it: its address."""

    def state(self, timeout_s: float) -> State:
        """Ask it for its state. Raises RemoteGone and RemoteRefused."""

    def sample(self, num_bytes: int, timeout_s: float) -> float:
        """Bytes a second that come from there, by so many. Raises as `state` does."""

    def ask(self, request: bytes, timeout_s: float) -> Stream:
        """Send a request (`wire.pack_request`); its answer once it begins. Raises RemoteGone, and
        RemoteRefused where the worker says why it will not."""
