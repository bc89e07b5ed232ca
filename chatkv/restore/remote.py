"""Having KV computed by a prefill worker: what that would take, and fetching it.

Whatever goes wrong there is no error of a turn: what has come is good, the rest is computed here,
and the reason is told.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from chatkv.apart.receive import Load, Put, Received, Receiver
from chatkv.apart.transport import RemoteError, Stream
from chatkv.apart.wire import Model, Request, WireDamaged, pack_request
from chatkv.restore.prefill_worker import Offer, PrefillWorker
from chatkv.restore.remote_cost import Way
from chatkv_store.layout import BLOCK_TOKENS, KVLayout

# Fewer tokens than a block are computed here before anybody has been asked.
MIN_TOKENS = BLOCK_TOKENS
# A fetch that takes this many times as long as it should, and so much more, is given up.
PATIENCE, PATIENCE_S = 4.0, 3.0
_POLL_S = 0.05


@dataclass(frozen=True)
class Fetched:
    """What came from a prefill worker, and what that took. num_cached: tokens from the first one
    on that are in the pool now."""

    offer: Offer
    num_cached: int
    num_bytes: int
    num_stored: int
    seconds: float
    queue_s: float | None
    prefill_s: float | None
    bytes_per_s: float | None
    failure: str | None

    @property
    def num_tokens(self) -> int:
        return max(0, self.num_cached - self.offer.start)

    @property
    def notices(self) -> tuple[str, ...]:
        if self.failure is None:
            return ()
        return (f"{told(self.offer.worker, self.failure)}, after {self.num_tokens} tokens",)

    def to_json(self) -> dict[str, Any]:
        """As it is kept with the turn."""
        way = self.offer.way
        return {
            "worker": self.offer.worker,
            "tokens": self.num_tokens,
            "bytes": self.num_bytes,
            "stored_tokens": self.num_stored,
            "ms": _ms(self.seconds),
            "queue_ms": _ms(self.queue_s),
            "prefill_ms": _ms(self.prefill_s),
            "bytes_per_s": None if self.bytes_per_s is None else round(self.bytes_per_s),
            "predicted": {
                "ms": _ms(way.seconds),
                "queue_ms": _ms(way.queue_s),
                "prefill_ms": _ms(way.prefill_s),
                "transfer_ms": _ms(way.transfer_s),
            },
            "through_store": way.through_store,
            "failure": self.failure,
        }


@dataclass(frozen=True)
class RemotePrefill:
    """A prefill worker for the sequences of one model and owner. namespace: of its blocks, as both
    ends know it without loss; store: what the worker may put them into, where it has it open."""

    worker: PrefillWorker
    model: Model
    layout: KVLayout
    namespace: bytes
    owner: str = ""
    store: str | None = None

    def offer(
        self, start: int, stop: int, load_s_per_token: float | None = None
    ) -> tuple[Offer | None, str | None]:
        """For the KV of tokens [start, stop): what fetching it would take; or why it cannot be
        fetched. Neither where so little is not worth asking for. load_s_per_token: of the store
        here, None where KV may not come through it."""
        if stop - start < MIN_TOKENS:
            return None, None
        try:
            found, queue_s = self.worker.offered(self.model)
        except RemoteError as error:
            return None, str(error)
        if stop > found.context:
            return None, f"has room for {found.context} tokens, not {stop}"
        num_bytes = (stop - start) * self.layout.bytes_per_token
        num_values = self.layout.num_values
        about = (found.rates, queue_s, start, stop, num_bytes, num_values)
        way = self.worker.cost.way(*about)
        is_shared = self.store is not None and found.store == self.store
        if is_shared and load_s_per_token is not None:
            cost = self.worker.through_store(load_s_per_token / self.layout.bytes_per_token)
            way = faster(way, cost.way(*about, through_store=True))
        return Offer(self.worker.name, start, stop, way), None

    def fetch(
        self,
        offer: Offer,
        ids: Sequence[int],
        name: str,
        put: Put,
        load: Load | None,
        meanwhile: Callable[[], int],
        on_ready: Callable[[int], None],
        is_unwanted: Callable[[], bool],
    ) -> Fetched:
        """Bring the offered KV of `ids` into its place; see `Receiver` for `put` and `load`.

        meanwhile() is called while the worker begins, and brings what is before it: how many
        leading tokens are there then. is_unwanted() is asked often, and ends it early.
        """
        hidden = hashlib.blake2b(name.encode(), key=self.namespace, digest_size=16).hexdigest()
        store = self.store if load is not None else None
        request = Request(self.model, offer.start, hidden, self.owner, store)
        receiver = Receiver(self.layout, self.namespace, ids, offer.start, put, load)
        began, num_before, failure = time.perf_counter(), -1, None
        guard = _Guard(PATIENCE_S + PATIENCE * offer.seconds, is_unwanted)
        try:
            with self.worker.asking(pack_request(request, ids)) as stream, guard.over(stream):
                num_before = meanwhile()
                if num_before >= offer.start:
                    receiver.run(stream.read_into, on_ready)
        except (RemoteError, WireDamaged) as error:
            failure = guard.reason or _failure(error)
        if not guard.is_unwanted:
            self.worker.note(failure)
        if num_before < 0:
            num_before = meanwhile()
        received = receiver.received
        is_whole = num_before >= offer.start
        if not is_whole:
            failure = failure or "was not needed: what lies before it could not be loaded"
        seconds = time.perf_counter() - began
        fetched = self._fetched(offer, received, seconds, failure, is_whole, num_before)
        self._learn(fetched)
        return fetched

    def _fetched(
        self,
        offer: Offer,
        received: Received,
        seconds: float,
        failure: str | None,
        is_whole: bool,
        num_before: int,
    ) -> Fetched:
        end = received.end
        rate = received.rated_bytes / received.rated_s if received.rated_s else None
        if offer.way.through_store:  # what came over the wire beside it is little
            stored_s = received.loaded_s + end.store_s if end else 0.0
            stored_bytes = received.num_stored * self.layout.bytes_per_token
            rate = stored_bytes / stored_s if stored_bytes and stored_s else None
        return Fetched(
            offer,
            received.num_ready if is_whole else num_before,
            received.num_bytes,
            received.num_stored,
            seconds,
            end.queue_s if end else None,
            end.prefill_s if end else None,
            rate,
            failure,
        )

    def _learn(self, fetched: Fetched) -> None:
        """Correct what such a fetch is expected to take."""
        way, rate = fetched.offer.way, fetched.bytes_per_s
        if fetched.queue_s is not None and fetched.prefill_s is not None:
            spent = (fetched.seconds, fetched.queue_s, fetched.prefill_s)
        elif fetched.seconds > way.seconds:  # given up: because of its link, or else of itself
            moving_s = fetched.num_bytes / rate if rate else 0.0
            is_link = moving_s > fetched.seconds / 2
            prefill_s = way.prefill_s if is_link else fetched.seconds
            spent = (fetched.seconds, way.queue_s, prefill_s)
        else:
            return
        self.worker.observe(way, lambda cost: cost.after(way, *spent, rate))


def faster(wire: Way, store: Way) -> Way:
    """The way that is expected to take less."""
    return store if store.seconds < wire.seconds else wire


class _Guard:
    """Ends a stream that takes too long, or is not wanted any more; `reason` says which."""

    def __init__(self, most_s: float, is_unwanted: Callable[[], bool]) -> None:
        self._most_s, self._ask, self.is_unwanted = most_s, is_unwanted, False
        self._is_over = threading.Event()
        self.reason: str | None = None

    @contextmanager
    def over(self, stream: Stream) -> Iterator[None]:
        watch = threading.Thread(target=self._watch, args=(stream,), daemon=True)
        watch.start()
        try:
            yield
        finally:
            self._is_over.set()
            watch.join()

    def _watch(self, stream: Stream) -> None:
        deadline = time.monotonic() + self._most_s
        while not self._is_over.wait(_POLL_S):
            if self._ask():
                self.is_unwanted, self.reason = True, "was not needed any more"
            elif time.monotonic() > deadline:
                self.reason = f"was too slow: not done after {self._most_s:.1f} s"
            if self.reason is not None:
                return stream.stop()


def told(worker: str, reason: str) -> str:
    """Why a prompt was computed here, as a notice."""
    return f"the prefill worker at {worker} {reason}: computed here"


def _failure(error: Exception) -> str:
    if isinstance(error, WireDamaged):
        return f"sent what cannot be used ({error})"
    return str(error)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 2)
