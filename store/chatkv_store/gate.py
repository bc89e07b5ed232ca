"""A lock that many may share, or one may have alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Shared by transactions, exclusive for remapping; a waiting remapping goes first."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = 0
        self._closed = 0  # remappings that wait or run

    def enter(self) -> None:
        with self._condition:
            while self._closed:
                self._condition.wait()
            self._inside += 1

    def leave(self) -> None:
        with self._condition:
            self._inside -= 1
            if self._inside == 0 and self._closed:
                self._condition.notify_all()

    @contextmanager
    def shared(self) -> Iterator[None]:
        self.enter()
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._condition:
            self._closed += 1
            try:
                while self._inside:
                    self._condition.wait()
                yield
            finally:
                self._closed -= 1
                self._condition.notify_all()

    @contextmanager
    def upgraded(self) -> Iterator[None]:
        """From shared to exclusive and back."""
        self.leave()
        try:
            with self.exclusive():
                yield
        finally:
            self.enter()
