"""How fast one end of a restore gets on, beside what was expected of it."""

from __future__ import annotations

import time
from collections.abc import Iterable


class Pace:
    """How many times longer than expected one end takes, followed from piece to piece."""

    def __init__(self) -> None:
        self.is_known = False
        self._factor = 1.0
        self._expected_s = 1e-9  # of the piece that is on its way
        self._began: float | None = None

    def begin(self, expected_s: float) -> None:
        self._expected_s, self._began = max(expected_s, 1e-9), time.perf_counter()

    def end(self, expected_s: float | None = None, waited_s: float = 0.0) -> float:
        """The piece is done, or a part of it that was expected to take expected_s; the seconds
        that it took, less those that it waited."""
        seconds = self.elapsed_s - waited_s
        factor = seconds / max(expected_s or self._expected_s, 1e-9)
        self._factor = (self._factor + factor) / 2 if self.is_known else factor
        self.is_known, self._began = True, None
        return seconds

    def forget(self) -> None:
        """The piece on its way was for nothing."""
        self._began = None

    @property
    def expected_s(self) -> float:
        """Of the piece on its way, by what was expected at first."""
        return self._expected_s

    @property
    def is_busy(self) -> bool:
        return self._began is not None

    @property
    def factor(self) -> float:
        return max(self._factor, self.elapsed_s / self._expected_s)

    @property
    def settled(self) -> float:
        """The factor of the pieces that are done."""
        return self._factor

    @property
    def left_s(self) -> float:
        """Until the piece on its way is done; what is overdue will be so for as long again."""
        return abs(self._expected_s * self._factor - self.elapsed_s) if self.is_busy else 0.0

    @property
    def elapsed_s(self) -> float:
        return 0.0 if self._began is None else time.perf_counter() - self._began


class RunPace(Pace):
    """That of the loader, whose runs of blocks arrive in num_groups parts, some layers each."""

    def __init__(self, load_block_s: float, num_groups: int) -> None:
        super().__init__()
        self._load_block_s, self._num_groups = load_block_s, num_groups
        self.run = range(0)  # blocks that are just being loaded
        self._run_groups = num_groups  # of so many parts
        self._groups_ready = self._layers_ready = 0
        self._groups_took_s = 0.0

    @property
    def block_s(self) -> float:
        """Seconds to load one block."""
        if self.is_busy and self.run:
            return (self.elapsed_s + self.left_s) / (len(self.run) * self._share)
        return self._load_block_s * self.factor

    def begin_run(self, run: range, num_groups: int | None = None) -> None:
        """num_groups: only so many parts of these blocks."""
        self.run, self._groups_ready, self._layers_ready = run, 0, 0
        self._run_groups = num_groups or self._num_groups
        self.begin(self._load_block_s * len(run) * self._share)

    def layers_came(self, num_layers: int) -> None:
        """The next part of the run is there, and with it so many of its layers."""
        self._groups_ready, self._layers_ready = self._groups_ready + 1, num_layers
        self._groups_took_s = self.elapsed_s

    def has(self, layer: int, indices: Iterable[int]) -> bool:
        """Whether that layer of these blocks, all of the run, is there."""
        return layer < self._layers_ready and set(indices) <= set(self.run)

    def end_run(self, is_whole: bool) -> float:
        """The run is done, or was left as it is; the seconds that it took."""
        share = 1.0 if is_whole else max(self._groups_ready, 1) / self._run_groups
        expected_s = self._load_block_s * len(self.run) * self._share * share
        self.run = range(0)
        return self.end(expected_s)

    @property
    def _share(self) -> float:
        """Of its blocks, how much the run brings."""
        return self._run_groups / self._num_groups

    @property
    def left_s(self) -> float:
        """Until the run on its way is there; a part that is overdue is taken to come now."""
        if not self.is_busy:
            return 0.0
        elapsed_s, ready = self.elapsed_s, self._groups_ready
        took_s = self._groups_took_s / ready if ready else self._expected_s * self._factor
        group_s = took_s if ready else took_s / self._run_groups
        return max(group_s, elapsed_s / (ready + 1)) * self._run_groups - elapsed_s
