"""A turn's way from the disk to its last word: what moved, how fast, and what had been expected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chatkv.tui.status import duration
from chatkv.words import count, plural, size

NO_TURN = "No turn has been answered yet: this shows where its time goes."
MARKS = {"memory": "▒", "disk": "▓", "prefill": "█", "other": "░", "decode": "▄"}


@dataclass(frozen=True)
class Phase:
    """One stretch of a turn. `what` moved, and how fast."""

    name: str
    ms: float
    what: tuple[str, ...]


def phases(stats: dict[str, Any]) -> list[Phase]:
    """What a turn went through, in its order; phases in which nothing happened are left out."""
    tokens, timing = stats["tokens"], stats["timing"]
    restore_ms, prefill_ms = timing["restore_ms"], timing["prefill_ms"]
    num_bytes, speed = stats.get("loaded_bytes", 0), timing.get("decode_tokens_per_s")
    found = []

    def add(name: str, ms: float, *what: str) -> None:
        found.append(Phase(name, ms, tuple(text for text in what if text)))

    if tokens["reused"]:
        add("memory", 0.0, plural(tokens["reused"], "token"), "already there")
    if tokens["loaded"]:
        loaded, rate = size(num_bytes), _per_second(num_bytes, restore_ms, size)
        add("disk", restore_ms, plural(tokens["loaded"], "token"), loaded * bool(num_bytes), rate)
    elif restore_ms >= 0.5 and not tokens.get("remote"):
        add("disk", restore_ms, "looked up, nothing loaded")
    if remote := stats.get("remote"):
        rate = _per_second(remote["bytes"], remote["ms"], size)
        came = (plural(remote["tokens"], "token"), size(remote["bytes"]), rate)
        add("prefill worker", remote["ms"], *came)
    if tokens["computed"]:
        rate = _per_second(tokens["computed"], prefill_ms, lambda n: f"{count(n)} tokens")
        add("prefill", prefill_ms, plural(tokens["computed"], "token"), rate)
    other_ms = timing["ttft_ms"] - restore_ms - prefill_ms
    if other_ms >= 0.5:
        add("other", other_ms, "template, plan, commit")
    if tokens["generated"] and speed:
        decode_ms = (tokens["generated"] - 1) / speed * 1e3
        add("decode", decode_ms, plural(tokens["generated"], "token"), f"{speed:.0f} tokens/s")
    return found


def lines(stats: dict[str, Any], width: int) -> list[str]:
    """The panel's text, no line longer than `width` cells."""
    if not stats:
        return [NO_TURN]
    found = phases(stats)
    total_ms = sum(phase.ms for phase in found)
    shown = [_strip(found, total_ms, width)] if total_ms else []
    for phase in found:
        head = f"{MARKS[phase.name]} {phase.name:<8}{duration(phase.ms):>8}"
        shown += _fitted(head, phase.what, width)
    shown += ["", *_plan(stats["plan"], stats.get("regret_ms"), width)]
    return [line[:width] for line in shown]


def _strip(found: list[Phase], total_ms: float, width: int) -> str:
    """All phases side by side, each as long as it took."""
    strip, end_ms = "", 0.0
    for phase in found:
        end_ms += phase.ms
        end = round(width * end_ms / total_ms)
        strip += MARKS[phase.name] * max(0, end - len(strip))
    return strip


def _plan(plan: dict[str, Any], regret_ms: float | None, width: int) -> list[str]:
    """Every plan that was possible: what it was expected to take, and what the chosen one took."""
    chosen, ways = plan["chosen"], plan["alternatives_ms"]
    if chosen == "none":
        return ["nothing had to be restored"]
    expected = ways or {chosen: plan["predicted_ms"]}
    longest = max(*expected.values(), plan["actual_ms"], 1e-9)
    room = max(4, min(24, width - 34))

    def row(mark: str, name: str, ms: float, words: str) -> str:
        cells = max(1, round(room * ms / longest))
        return f"{mark} {name:<11}{words:<9}{duration(ms):>8} {'▬' * cells}"

    shown = []
    for way, ms in sorted(expected.items(), key=lambda item: item[1]):
        shown.append(row("→" if way == chosen else " ", way, ms, "expected"))
        if way == chosen:
            shown.append(row(" ", "", plan["actual_ms"], "took"))
    if regret_ms is not None and regret_ms > 20:
        shown.append(f"{duration(regret_ms)} more than the fastest plan was expected to take")
    return shown


def _fitted(head: str, details: Sequence[str], width: int) -> list[str]:
    """`head` and the details beside it, or below it where they do not fit."""
    whole = "  ".join([head, *details])
    if len(whole) <= width:
        return [whole]
    whole = ", ".join(details)
    below = [whole] if len(whole) + 4 <= width else details
    return [head, *(f"    {text}" for text in below)]


def _per_second(amount: int, ms: float, shown: Any) -> str:
    return f"{shown(round(amount / ms * 1e3))}/s" if amount and ms >= 0.05 else ""
