"""One prefill worker as a decode worker knows it: what it offers, how it has been lately."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from chatkv.apart.transport import (
    Offered,
    RemoteError,
    RemoteGone,
    RemoteRefused,
    State,
    Stream,
    Transport,
)
from chatkv.apart.wire import Model
from chatkv.restore.remote_cost import RemoteCost, Way, untried_store

# A state is believed for so long; asking for it may take so long.
FRESH_S, STATE_S = 1.0, 2.0
# A worker with nothing to say says so twice a second: one that is silent for so long is gone.
SILENT_S = 3.0
# After it was away, it is asked again so much later, twice as long each time until the most.
AWAY_S, MAX_AWAY_S = 1.0, 60.0
SAMPLE_BYTES = 256 << 10


@dataclass(frozen=True)
class Offer:
    """What fetching the KV of tokens [start, stop) would take."""

    worker: str
    start: int
    stop: int
    way: Way

    @property
    def seconds(self) -> float:
        return self.way.seconds


class PrefillWorker:
    """One worker as this process knows it, for all its models. Safe to use from several threads."""

    def __init__(self, transport: Transport, clock: Callable[[], float] = time.monotonic) -> None:
        self.transport, self._clock = transport, clock
        self.cost = RemoteCost()  # over the wire
        self.store_cost: RemoteCost | None = None  # through a shared store, once there is one
        self._lock = threading.Lock()
        self._state: State | None = None
        self._asked_at = 0.0
        self._is_rated = False
        self._away_until, self._away_s, self._reason = 0.0, AWAY_S, ""

    @property
    def name(self) -> str:
        return self.transport.name

    def offered(self, model: Model) -> tuple[Offered, float]:
        """What it offers for this model, and how long one would wait there. Asks it, unless it has
        been asked just now. Raises RemoteError, also while it is not to be asked again."""
        with self._lock:
            now = self._clock()
            if now < self._away_until:
                raise RemoteGone(self._reason)
            if self._state is None or now - self._asked_at > FRESH_S:
                self._state = self._asked()
            found = next((one for one in self._state.models if one.model == model), None)
            if found is not None:
                return found, self._state.queue_s
            others = [one.model.difference(model) for one in self._state.models]
            raise RemoteRefused(f"has {others[0] or 'no model'}" if others else "has no model yet")

    def _asked(self) -> State:
        """Its state, and once what the link to it is worth."""
        try:
            state = self.transport.state(STATE_S)
            if not self._is_rated:
                rate = self.transport.sample(SAMPLE_BYTES, STATE_S)
                self.cost = RemoteCost(bytes_per_s=rate)
        except RemoteError as error:
            self._note(str(error))
            raise
        self._note(None)
        self._is_rated, self._asked_at = True, self._clock()
        return state

    def through_store(self, load_s_per_byte: float) -> RemoteCost:
        """What a shared store costs, from which loading was measured to take so long."""
        with self._lock:
            if self.store_cost is None:
                self.store_cost = untried_store(load_s_per_byte)
            return self.store_cost

    def observe(self, way: Way, correct: Callable[[RemoteCost], RemoteCost]) -> None:
        """A fetch has taught what its way costs. The other one was not tried."""
        with self._lock:
            if way.through_store and self.store_cost is not None:
                self.store_cost, self.cost = correct(self.store_cost), self.cost.after_none()
            else:
                self.cost = correct(self.cost)
                self.store_cost = self.store_cost and self.store_cost.after_none()

    def after_none(self) -> None:
        """A turn has asked it for nothing, because that seemed slower."""
        with self._lock:
            self.cost = self.cost.after_none()
            self.store_cost = self.store_cost and self.store_cost.after_none()

    @contextmanager
    def asking(self, request: bytes) -> Iterator[Stream]:
        """The answer to a request, as long as the block of code goes on. Raises RemoteError."""
        stream = self.transport.ask(request, SILENT_S)
        try:
            yield stream
        finally:
            stream.close()

    def note(self, failure: str | None) -> None:
        """How a fetch has ended: after a failure the worker is not asked again at once."""
        with self._lock:
            self._note(failure)

    def _note(self, failure: str | None) -> None:
        if failure is None:
            self._away_s = AWAY_S
            return
        self._away_until = self._clock() + self._away_s
        self._away_s = min(2 * self._away_s, MAX_AWAY_S)
        self._state, self._reason = None, failure
