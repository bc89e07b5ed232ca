"""What is ready before Enter is pressed. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ready:
    """Tokens of the history and a draft whose KV is in memory, by where it came from, and the
    milliseconds that bringing it there took. cached = reused + loaded + computed + remote."""

    cached: int
    reused: int = 0
    loaded: int = 0
    computed: int = 0
    ms: float = 0.0
    remote: int = 0
