"""`chatkv why`: where a turn's KV came from, why that way, and where the time went."""

from __future__ import annotations

from typing import Any

import click

from chatkv.cli.output import Output, count, output_options, plural, printable
from chatkv.cli.sessions import SESSION
from chatkv.cli.stores import open_conversations
from chatkv.cli.table import Column
from chatkv_store.errors import StoreError

NAMES = {
    "reload": "reload from disk",
    "re-prefill": "compute everything again",
    "both": "both ends at once",
}


@click.command()
@SESSION
@click.option("--turn", type=click.IntRange(min=1), metavar="N", help="Which turn [default: last].")
@output_options
def why(output: Output, session: str, turn: int | None) -> None:
    """Explain a turn: what was reused, loaded and computed, and why.

    SESSION is an id, the start of one (4 characters or more) or an exact title.
    """
    with open_conversations() as store:
        found = store.get_session(session)
        turns = store.chain(found.id)
    number = turn or len(turns)
    if not 1 <= number <= len(turns):
        raise StoreError(f"session {found.id} has {plural(len(turns), 'turn')}, no turn {number}")
    chosen = turns[number - 1]
    if not chosen.stats:
        raise StoreError(
            f"turn {number} of session {found.id} was cut off before anything was measured"
        )
    if not output.is_human:
        output.record({"session": found.id, "turn": number, **chosen.stats})
        return
    output.line(f"turn {number} of {found.id} · {printable(found.title) or 'untitled'}", bold=True)
    for line in explain(chosen.stats):
        output.line(line)
    ways = _ways(chosen.stats["plan"])
    if len(ways) > 1:
        output.line()
        output.table(
            ways,
            [
                Column("PLAN", lambda row: row["name"], colour="cyan"),
                Column("EXPECTED", lambda row: _ms(row["expected_ms"]), is_number=True),
                Column("TOOK", lambda row: _ms(row["actual_ms"]), is_number=True),
            ],
        )


def explain(stats: dict[str, Any]) -> list[str]:
    """The turn in sentences."""
    tokens, plan, timing = stats["tokens"], stats["plan"], stats["timing"]
    came = [
        f"{count(tokens[key])} {words}"
        for key, words in (
            ("reused", "were still in memory"),
            ("loaded", "came from disk"),
            ("computed", "were computed"),
        )
        if tokens[key]
    ]
    lines = [f"Before the answer stood {plural(tokens['prompt'], 'token')}: {_listed(came)}."]
    lines.append(_reason(plan))
    lines += [f"Note: {notice}." for notice in stats.get("notices", [])]
    if timing["ttft_ms"]:
        lines.append(
            f"The first token came after {_ms(timing['ttft_ms'])}: {_ms(timing['restore_ms'])} to "
            f"look up and load, {_ms(timing['prefill_ms'])} to compute."
        )
    if timing["decode_tokens_per_s"]:
        rate = timing["decode_tokens_per_s"]
        lines.append(f"Then {plural(tokens['generated'], 'token')} at {rate:.0f} a second.")
    return lines


def _reason(plan: dict[str, Any]) -> str:
    chosen, ways = plan["chosen"], plan["alternatives_ms"]
    if chosen == "none":
        return "Nothing had to be restored."
    others = {way: ms for way, ms in ways.items() if way != chosen}
    said = f"It was restored by: {NAMES[chosen]}, expected to take {_ms(plan['predicted_ms'])}"
    if not others:
        return f"{said}; there was no other way."
    best = min(others, key=lambda way: others[way])
    if abs(others[best] - plan["predicted_ms"]) < 1:
        return f"{said}, as long as the next best way ({NAMES[best]})."
    if others[best] > plan["predicted_ms"]:
        return f"{said}, {_ms(others[best] - plan['predicted_ms'])} less than the next best way."
    return (
        f"{said}, {_ms(plan['predicted_ms'] - others[best])} more than the fastest way "
        f"({NAMES[best]}): it was asked for, or is exact to the bit and hardly slower."
    )


def _ways(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Every plan that was possible, the fastest expected first."""
    ways = sorted(plan["alternatives_ms"].items(), key=lambda item: item[1])
    return [
        {
            "name": NAMES[way] + (" (chosen)" if way == plan["chosen"] else ""),
            "expected_ms": expected,
            "actual_ms": plan["actual_ms"] if way == plan["chosen"] else None,
        }
        for way, expected in ways
    ]


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _ms(milliseconds: float | None) -> str:
    if milliseconds is None:
        return ""
    if milliseconds < 9_950:
        return f"{milliseconds:,.0f} ms"
    return f"{milliseconds / 1e3:.1f} s"
