"""Places in the write paths where a test can let the process die, or the disk fail.

    CHATKV_FAILPOINT=conversations.written:3        kill -9 at the third pass of that place
    CHATKV_FAILPOINT=blocks.written:1:ENOSPC        raise that OSError at the first, and ever after

The variable is read once. Where it is not set, which is always but in tests, a place costs the call
of an empty function.
"""

from __future__ import annotations

import errno
import os
import signal

VARIABLE = "CHATKV_FAILPOINT"

# Every place, so that a test can try each and notices one that it does not know.
CONVERSATIONS = (
    "conversations.migrated",
    "conversations.begun",
    "conversations.written",
    "conversations.committed",
)
BLOCKS = (
    "blocks.begun",
    "blocks.values",
    "blocks.headers",
    "blocks.written",
    "blocks.committed",
    "blocks.grow",
    "blocks.grown",
)


def _never(place: str) -> None:
    """No place is armed."""


class _Armed:
    """One place that fails from its `at`-th pass on."""

    def __init__(self, setting: str) -> None:
        self._place, _, rest = setting.partition(":")
        at, _, self._error = rest.partition(":")
        self._passes_left = int(at or 1)

    def __call__(self, place: str) -> None:
        if place != self._place:
            return
        self._passes_left -= 1
        if self._passes_left > 0:
            return
        if self._error:
            code = getattr(errno, self._error)
            raise OSError(code, os.strerror(code))
        os.kill(os.getpid(), signal.SIGKILL)


_setting = os.environ.get(VARIABLE)
failpoint = _Armed(_setting) if _setting else _never
