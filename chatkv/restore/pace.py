"""How fast one end of a restore gets on, beside what was expected of it."""

from __future__ import annotations

import time


class Pace:
    """How many times longer than expected one end takes, followed from piece to piece."""

    def __init__(self) -> None:
        self.is_known = False
        self._factor = 1.0
        self._expected_s = 1e-9  # of the piece that is on its way
        self._began: float | None = None

    def begin(self, expected_s: float) -> None:
        self._expected_s, self._began = max(expected_s, 1e-9), time.perf_counter()

    def end(self, expected_s: float | None = None) -> float:
        """The piece is done, or a part of it that was expected to take expected_s; the seconds
        that it took."""
        seconds = self._elapsed_s
        factor = seconds / max(expected_s or self._expected_s, 1e-9)
        self._factor = (self._factor + factor) / 2 if self.is_known else factor
        self.is_known, self._began = True, None
        return seconds

    @property
    def is_busy(self) -> bool:
        return self._began is not None

    @property
    def factor(self) -> float:
        return max(self._factor, self._elapsed_s / self._expected_s)

    @property
    def left_s(self) -> float:
        """Until the piece on its way is done; what is overdue will be so for as long again."""
        return abs(self._expected_s * self._factor - self._elapsed_s) if self.is_busy else 0.0

    @property
    def _elapsed_s(self) -> float:
        return 0.0 if self._began is None else time.perf_counter() - self._began
