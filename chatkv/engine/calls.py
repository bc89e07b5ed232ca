"""Small work for the thread that computes, between two steps of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Call:
    """`done` is set once `work` has returned, or raised `error`."""

    work: Callable[[], None]
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:  # nobody may wait for a thread that has ended
            self.error = error
        self.done.set()

    def result(self) -> None:
        """Wait for it; raises what it raised."""
        self.done.wait()
        if self.error is not None:
            raise self.error
