"""What came out of the model for the newest tokens of a sequence, from which drafts go on.

It is kept for the last tokens in a row that were computed here, and nowhere else: a turn computes
all of its prompt and its answer, so its drafts find the same whether the history in front of them
was in memory, came from the disk or was computed again.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_ROWS = 512


class Trail:
    """Rows of positions [start, stop), as they come out of the decoder's last norm."""

    def __init__(self) -> None:
        self.start = self.stop = self._floor = 0
        self._rows = torch.empty(0, 0)  # that of `start` first, and room for as many again

    def __len__(self) -> int:
        return self.stop - self.start

    def extend(self, position: int, rows: Tensor) -> None:
        """Rows [num_rows, hidden_size] of tokens from `position` on were computed, at most MAX_ROWS
        of them. What does not follow on takes the place of what was here."""
        if position < self._floor:
            rows, position = rows[self._floor - position :], self._floor
        if not len(rows):
            return
        if not self.start <= position <= self.stop:
            self.start = self.stop = position
        self.stop = position
        if not len(self._rows):
            self._rows = rows.new_empty(2 * MAX_ROWS, rows.shape[1])
        if len(self) + len(rows) > len(self._rows):
            self._drop_to(position - MAX_ROWS)
        self._rows[len(self) : len(self) + len(rows)] = rows
        self.stop += len(rows)

    def cut(self, stop: int) -> None:
        """Tokens from that position on became other ones."""
        self.stop = min(self.stop, stop)
        self.start, self._floor = min(self.start, self.stop), min(self._floor, self.stop)

    def begin_at(self, start: int) -> None:
        """Forget what came before that position, and keep none of it any more."""
        self._floor = start
        self._drop_to(start)

    def _drop_to(self, start: int) -> None:
        kept = self.stop - start
        if kept <= 0:
            self.start = self.stop = start
        elif start > self.start:
            self._rows[:kept] = self._rows[start - self.start : len(self)].clone()
            self.start = start

    def since(self, position: int) -> Tensor:
        """A view of the rows of [position, stop), which begin in here."""
        assert self.start <= position <= self.stop
        return self._rows[position - self.start : len(self)]
