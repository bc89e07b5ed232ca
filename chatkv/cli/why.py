"""`chatkv why`: where a turn's KV came from, why that way, and where the time went."""

from __future__ import annotations

from typing import Any

import click

from chatkv.cli.output import Output, count, output_options, plural, printable, size
from chatkv.cli.sessions import SESSION
from chatkv.cli.stores import open_conversations
from chatkv.cli.table import Column
from chatkv_store.errors import StoreError

NAMES = {
    "reload": "reload from disk",
    "re-prefill": "compute everything again",
    "both": "both ends at once",
    "none": "compute what is new here",
    "remote": "have it computed by the prefill worker",
}
VERBS = {
    "reload": "reload from disk",
    "re-prefill": "compute everything again",
    "both": "do both at once",
    "none": "compute what is new here",
    "remote": "have it computed by the prefill worker",
}
BUT = {
    "exact": "but this is hardly slower, and exact to the bit",
    "asked": "but this was asked for",
    "only-exact": "but --exact allows only KV that was kept",
}
# Beyond what nobody notices, a turn that took longer than the fastest plan was promised says so.
REGRET_MS, REGRET_SHARE = 20.0, 0.25


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
    if "tokens" not in chosen.stats:
        came = "imported" in chosen.stats or chosen.stats.get("is_adopted")
        reason = "came from elsewhere" if came else "was cut off before anything was measured"
        raise StoreError(f"turn {number} of session {found.id} {reason}")
    if not output.is_human:
        output.record({"session": found.id, "turn": number, **chosen.stats})
        return
    output.line(f"turn {number} of {found.id} · {printable(found.title) or 'untitled'}", bold=True)
    for line in explain(chosen.stats, num_new=len(chosen.prompt_ids) + (number > 1)):
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


def explain(stats: dict[str, Any], num_new: int) -> list[str]:
    """The turn in sentences. num_new: tokens that no earlier turn had computed, which are those of
    its message and the last one of the answer before it, which ended that answer."""
    tokens, timing = stats["tokens"], stats["timing"]
    came = [
        f"{count(tokens[key])} {words}"
        for key, words in (
            ("reused", "were still in memory"),
            ("loaded", "came from disk"),
            ("remote", "came from the prefill worker"),
            ("computed", "were computed"),
        )
        if tokens.get(key)
    ]
    again = tokens["computed"] - num_new
    and_so = f", {count(again)} of them once more" if again > 0 else ""
    before = plural(tokens["prompt"], "token")
    lines = [f"Before the answer stood {before}: {_listed(came)}{and_so}."]
    if stats.get("recomputed"):
        lines.append(_recomputed(stats["recomputed"], stats.get("recomputed_layers")))
    if stats.get("departure"):
        lines.append(_departed(stats["departure"]))
    lines += _reason(stats["plan"], stats.get("regret_ms"))
    if stats.get("cold") is not None and stats["plan"]["alternatives_ms"]:
        lines.append(_pages(stats["cold"]))
    if stats.get("remote"):
        lines.append(_fetched(stats["remote"]))
    lines += [f"Note: {printable(notice)}." for notice in stats.get("notices", [])]
    if stats.get("template"):
        lines.append(f"Note: {printable(stats['template'])}; the log stands, so KV is found.")
    if timing["ttft_ms"]:
        lines.append(_time(timing))
    if timing["decode_tokens_per_s"]:
        rate = timing["decode_tokens_per_s"]
        lines.append(f"Then {plural(tokens['generated'], 'token')} at {rate:.0f} a second.")
    if stats.get("speculation", {}).get("drafted"):
        lines.append(_speculated(stats["speculation"]))
    return lines


def _recomputed(ranges: list[list[int]], partly: dict[str, Any] | None) -> str:
    told = _listed([_tokens(*one) for one in ranges])
    if partly is None:
        return f"Computed once more were tokens {told}."
    some = "" if ranges == [partly["tokens"]] else f" {_tokens(*partly['tokens'])}"
    layers = f"{partly['layers']} of {partly['of']} layers"
    return f"Computed once more were tokens {told},{some} in {layers} (the others came from disk)."


def _tokens(first: int, stop: int) -> str:
    return f"{count(first + 1)} to {count(stop)}"


def _pages(cold: float) -> str:
    if cold < 0.05:
        return "Loading was expected to find all of it in memory already (warm)."
    said = "all of it" if cold > 0.95 else f"{100 * cold:.0f}% of it"
    return f"Loading was expected to fetch {said} from the disk itself (cold)."


def _speculated(speculation: dict[str, Any]) -> str:
    drafted, accepted = speculation["drafted"], speculation["accepted"]
    return (
        f"Of {plural(drafted, 'token')} guessed ahead ({speculation['source']}), {count(accepted)} "
        f"were right, so {plural(accepted + speculation['steps'], 'token')} took "
        f"{plural(speculation['steps'], 'step')}."
    )


def _fetched(remote: dict[str, Any]) -> str:
    """What the prefill worker was expected to do, and did."""
    expected, rate = remote["predicted"], remote["bytes_per_s"]
    said = (
        f"The prefill worker at {remote['worker']} brought {plural(remote['tokens'], 'token')}, "
        f"{size(remote['bytes'])}, in {_ms(remote['ms'])}; {_ms(expected['ms'])} were expected: "
    )
    parts = (("queue", "to wait"), ("prefill", "to compute"))
    took = [
        f"{_ms(remote[f'{part}_ms'])} {what} ({_ms(expected[f'{part}_ms'])} expected)"
        for part, what in parts
        if remote[f"{part}_ms"] is not None
    ]
    way = f"{_ms(expected['transfer_ms'])} expected on the way"
    if rate is not None:
        way += f", where bytes came at {size(rate)} a second"
    if remote["stored_tokens"]:
        way += f"; {plural(remote['stored_tokens'], 'token')} came through the shared cache"
    return said + _listed([*took, way]) + "."


def _departed(departure: dict[str, Any]) -> str:
    now, before = (_quoted(departure[key]["text"]) for key in ("token", "other"))
    return (
        f"Up to token {count(departure['position'])} it agrees with what was kept "
        f"{'in memory' if departure['where'] == 'memory' else 'on disk'}; "
        f"there {before} stood, and now {now} does."
    )


def _reason(plan: dict[str, Any], regret_ms: float | None) -> list[str]:
    """Why this plan, what it took, what the next best would have, and whether that was right."""
    chosen, ways = plan["chosen"], plan["alternatives_ms"]
    if chosen == "none" and not ways:
        return ["Nothing had to be restored."]
    took = f"{_ms(plan['predicted_ms'])} expected, {_ms(plan['actual_ms'])} taken"
    said = f"It was decided to {VERBS[chosen]}: {took}"
    others = {way: ms for way, ms in ways.items() if way != chosen}
    if not others:
        return [f"{said}; there was no other way."]
    best = min(others, key=lambda way: others[way])
    said += f"; to {VERBS[best]} would have taken about {_ms(others[best])}"
    if others[best] < plan["predicted_ms"] - 1 and plan.get("because") in BUT:
        said += f", {BUT[plan['because']]}"
    lines = [f"{said}."]
    if regret_ms is not None and regret_ms > max(REGRET_MS, REGRET_SHARE * min(ways.values())):
        lines.append(f"That is {_ms(regret_ms)} more than the fastest way was expected to take.")
    return lines


def _time(timing: dict[str, Any]) -> str:
    parts = [
        (timing["restore_ms"], "to look up and load"),
        (timing["prefill_ms"], "to compute"),
        (timing["ttft_ms"] - timing["restore_ms"] - timing["prefill_ms"], "for the rest"),
    ]
    spent = [f"{_ms(ms)} {what}" for ms, what in parts if ms >= 0.5]
    return f"The first token came after {_ms(timing['ttft_ms'])}: {_listed(spent)}."


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


def _quoted(text: str) -> str:
    """A token's text: newlines and the like as their escapes, what it lacks as what it is."""
    return printable(repr(text)) if text else "a token without text"


def _listed(parts: list[str]) -> str:
    if not parts:
        return "nothing"
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _ms(milliseconds: float | None) -> str:
    if milliseconds is None:
        return ""
    if milliseconds < 9_950:
        return f"{milliseconds:,.0f} ms"
    return f"{milliseconds / 1e3:.1f} s"
