"""Who prefills next, on a worker that only prefills: first come, first served, one at a time.

Prefill fills the cores, so two at once end when both would have one after the other, and the first
later. In turns, what somebody has to wait is known: the rest of all before them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from chatkv.engine.scheduler import POLL_S, Cancelled


@dataclass(eq=False)
class Ticket:
    """A place in the queue. expected_s: what its work will take."""

    queue: PrefillQueue
    expected_s: float
    came_at: float = field(default_factory=time.monotonic)
    began_at: float | None = None

    @property
    def waited_s(self) -> float:
        return (self.began_at or time.monotonic()) - self.came_at

    @property
    def rest_s(self) -> float:
        """What is left of its work."""
        done_s = 0.0 if self.began_at is None else time.monotonic() - self.began_at
        return max(0.0, self.expected_s - done_s)

    @contextmanager
    def turn(self, cancelled: threading.Event) -> Iterator[None]:
        """Wait until it is first, and be that as long as the block of code goes on. Raises
        Cancelled."""
        try:
            self.queue.wait(self, cancelled)
            self.began_at = time.monotonic()
            yield
        finally:
            self.queue.leave(self)


class PrefillQueue:
    """The tickets in their order; any thread may ask."""

    def __init__(self) -> None:
        self._tickets: list[Ticket] = []
        self._changed = threading.Condition()

    def ticket(self, expected_s: float) -> Ticket:
        """A place at the end, to be given back by `Ticket.turn`."""
        with self._changed:
            ticket = Ticket(self, expected_s)
            self._tickets.append(ticket)
            return ticket

    @property
    def expected_s(self) -> float:
        """How long a new ticket would wait."""
        with self._changed:
            return sum(ticket.rest_s for ticket in self._tickets)

    def __len__(self) -> int:
        return len(self._tickets)

    def wait(self, ticket: Ticket, cancelled: threading.Event) -> None:
        with self._changed:
            while self._tickets[0] is not ticket:
                self._changed.wait(POLL_S)
                if cancelled.is_set():
                    raise Cancelled

    def leave(self, ticket: Ticket) -> None:
        with self._changed:
            if ticket in self._tickets:
                self._tickets.remove(ticket)
            self._changed.notify_all()
