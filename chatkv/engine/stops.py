"""Stop strings, found also where they cross the borders of tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on as it comes, holding back what may be the start of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stop for stop in stops if stop)
        self.stopped = False
        self._held = ""

    def push(self, text: str) -> str:
        """Text that is safe to show now. Once a stop string is complete, `stopped` is set and
        nothing from it on is ever returned."""
        if self.stopped or not self.stops:
            return "" if self.stopped else text
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self.stops) if at >= 0]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        keep = self._possible_start()
        shown, self._held = self._held[: len(self._held) - keep], self._held[-keep:] * (keep > 0)
        return shown

    def flush(self) -> str:
        """What was held back, at the end of a reply that no stop string ended."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that begins some stop string."""
        longest = max(map(len, self.stops)) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self.stops):
                return size
        return 0
