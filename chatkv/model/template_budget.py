"""What one rendering of a chat template may use: steps, CPU time and characters.

A template is a program out of an unknown file. Whatever makes much out of little pays here before
it does so; what only makes as much as it was given pays afterwards.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import TemplateError

# A conversation that fills a context of a million tokens is about 5 million characters.
MAX_STEPS = 1_000_000
MAX_CPU_SECONDS = 10.0
MAX_TEXT_CHARS = 10_000_000  # one string
MAX_TOTAL_CHARS = 100_000_000  # all strings made on the way together
MAX_NUMBER = 100_000  # as a width, a count or the like

_STEPS_A_LOOK = 64  # looking at the clock takes as long as the step itself
_ITEM_CHARS = 8  # what a list's item costs: a pointer's bytes
_LARGE_WIDTH = re.compile(r"\d{5}|%[^a-zA-Z%]*\*")


class TooMuch(TemplateError):
    """A template went over its budget."""


class Budget:
    """What is left to one rendering. Every method raises TooMuch where it is not enough."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._chars = MAX_TOTAL_CHARS
        self._deadline = time.thread_time() + MAX_CPU_SECONDS
        self._look_at = self._steps  # with fewer steps left, the clock is looked at

    def step(self, count: int = 1) -> None:
        """Pay for so many rounds of a loop, calls or operations."""
        self._steps -= count
        if self._steps < self._look_at:
            self._look_at = max(0, self._steps - _STEPS_A_LOOK)
            if self._steps < 0 or time.thread_time() > self._deadline:
                raise TooMuch("it takes too long")

    def text(self, chars: int, times: int = 1) -> None:
        """Pay for a string of that length, made so many times."""
        self._chars -= chars * times
        if chars > MAX_TEXT_CHARS or self._chars < 0:
            raise TooMuch("it makes too much text")

    def items(self, count: int) -> None:
        """Pay for a list of that length, its items not included."""
        self.text(count * _ITEM_CHARS)

    def made(self, value: Any) -> Any:
        """Pay for a string or list that was just made from ones paid for; returns it."""
        if isinstance(value, str):
            self.text(len(value))
        elif isinstance(value, (list, tuple, dict)):
            self.items(len(value))
        return value

    def nested(self, value: Any) -> Any:
        """Pay for everything in nested values, shared parts each time they occur; returns it.

        Sixty lists, each holding the one before it twice, are small; their text is not, and to
        compare two such heaps takes for ever.
        """
        self.step()
        if isinstance(value, str):
            self.text(len(value))
        elif isinstance(value, dict):
            self.items(len(value))
            for key, child in value.items():
                self.nested(key)
                self.nested(child)
        elif isinstance(value, (list, tuple)):
            self.items(len(value))
            for child in value:
                self.nested(child)
        return value

    def sum(self, left: Any, right: Any) -> None:
        """Pay for `left + right`."""
        if isinstance(left, str) and isinstance(right, str):
            self.text(len(left) + len(right))
        elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
            self.items(len(left) + len(right))

    def product(self, left: Any, right: Any) -> None:
        """Pay for `left * right`, of which one may be a string or list."""
        self.numbers(left, right)
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, str) and isinstance(count, int):
                self.text(len(sequence) * max(count, 0))
            elif isinstance(sequence, (list, tuple)) and isinstance(count, int):
                self.items(len(sequence) * max(count, 0))

    def power(self, left: Any, right: Any) -> None:
        """Pay for `left ** right`."""
        self.numbers(left)
        if isinstance(right, (int, float)) and abs(right) > 64:
            raise TooMuch("it computes too large a number")

    def format(self, form: str, *values: Any) -> None:
        """Pay for a format string filled in, old style or new."""
        if _LARGE_WIDTH.search(form):
            raise TooMuch("it formats too widely")
        self.numbers(*values)
        self.nested(values)

    def replace(self, text: str, old: str, new: str) -> None:
        self.text(len(text) + text.count(old) * len(new))

    def join(self, separator: str, parts: list[Any]) -> None:
        self.nested(parts)
        self.text(len(separator) * len(parts))

    def numbers(self, *values: Any) -> None:
        """Refuse numbers that are no sensible width, count or factor."""
        for value in values:
            if isinstance(value, int) and abs(value) > MAX_NUMBER:
                raise TooMuch("it uses too large a number")


_current: ContextVar[Budget | None] = ContextVar("budget", default=None)


@contextmanager
def fresh_budget() -> Iterator[None]:
    """Everything in the block, in this thread, lives on one budget."""
    token = _current.set(Budget())
    try:
        yield
    finally:
        _current.reset(token)


def budget() -> Budget:
    """The budget in force. Outside of renderings (constants, while compiling), one of its own."""
    return _current.get() or Budget()
