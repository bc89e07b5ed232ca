"""What the line at the bottom says: state in, text out. A narrow one keeps what matters most."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from chatkv.client import Ready
from chatkv.tui.progress import bar
from chatkv.words import count

# Where most of a turn's tokens were, by the names of its stats -> the tier's.
TIERS = {"reused": "memory", "loaded": "disk", "computed": "computed", "remote": "prefill worker"}


@dataclass(frozen=True)
class Status:
    """`stats`: those of the last turn, as they are kept with it; {} before the first."""

    model: str = ""
    doing: str = "starting"
    used: int = 0  # tokens of the log
    limit: int = 0  # of the context
    stats: dict[str, Any] = field(default_factory=dict)
    draft: str = ""  # how much of what is being typed is ready

    def line(self, width: int) -> str:
        """As many parts as fit into `width` cells, in a fixed order, the least important left out
        first."""
        parts = [part for part in self._parts() if part[1]]
        while len(parts) > 1 and len(_joined(parts)) > width:
            parts.remove(min(parts))
        ordered = [text for _, text in parts]
        return " · ".join(ordered)[:width]

    def _parts(self) -> list[tuple[int, str]]:
        """(importance, text), from left to right."""
        tokens, timing = self.stats.get("tokens", {}), self.stats.get("timing", {})
        plan = self.stats.get("plan", {}).get("chosen", "none")
        came = [f"{count(tokens[key])} {words}" for key, words in _CAME if tokens.get(key)]
        rate, ttft = timing.get("decode_tokens_per_s"), timing.get("ttft_ms")
        return [
            (10, self.doing),
            (9, self.draft),
            (8, self._context()),
            (4, self.model),
            (5, " + ".join(came)),
            (2, f"plan {plan}" if plan != "none" else ""),
            (7, f"first token {duration(ttft)}" if ttft else ""),
            (6, f"{rate:.0f} tokens/s" if rate else ""),
            (1, _guessed(self.stats.get("speculation", {}))),
            (3, f"from {tier(self.stats)}" if came else ""),
        ]

    def _context(self) -> str:
        if not self.limit:
            return ""
        filled = bar(self.used, 0, self.limit, 6)
        return f"{filled} {count(self.used)}/{short(self.limit)}"


def _guessed(speculation: dict[str, Any]) -> str:
    """How many of the drafted tokens were right."""
    drafted = speculation.get("drafted", 0)
    return f"{100 * speculation['accepted'] // drafted}% of guesses right" if drafted else ""


_CAME = (
    ("reused", "reused"),
    ("loaded", "loaded"),
    ("remote", "from the prefill worker"),
    ("computed", "computed"),
)


def restored(ready: Ready, num_tokens: int) -> str:
    """What was brought back, from where, in how long."""
    came = [
        f"{count(number)} {where}"
        for number, where in (
            (ready.reused, "still in memory"),
            (ready.loaded, "from disk"),
            (ready.remote, "from the prefill worker"),
            (ready.computed, "computed again"),
        )
        if number
    ]
    if not came:
        return "nothing could be restored ahead: the next answer reads the conversation first"
    return (
        f"restored {count(ready.cached)} of {count(num_tokens)} tokens "
        f"in {duration(ready.ms)}: {', '.join(came)}"
    )


def tier(stats: dict[str, Any]) -> str:
    """Where most of the KV that a turn stood on came from."""
    tokens = stats.get("tokens", {})
    kept = {key: tokens.get(key, 0) for key in TIERS}
    return TIERS[max(kept, key=lambda key: kept[key])]


def duration(milliseconds: float) -> str:
    """ "12 ms", "1.4 s"."""
    return f"{milliseconds:,.0f} ms" if milliseconds < 995 else f"{milliseconds / 1e3:.1f} s"


def short(number: int) -> str:
    """ "8k", "131k", "512"."""
    return f"{number // 1000}k" if number >= 1000 else str(number)


def _joined(parts: list[tuple[int, str]]) -> str:
    return " · ".join(text for _, text in parts)
