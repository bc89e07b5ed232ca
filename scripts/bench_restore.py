#!/usr/bin/env python3
"""Reload, re-prefill or both ends, over history lengths and disks of every speed.

Each cell of the grid is one history length on one source (restore_grid.py); each plan is forced and
timed to the first logits of a short new prompt, and the planner's own choice is held against the
fastest. Beside them: a history that is still in memory, and a conversation that is opened, then
typed into. --plot draws the grid.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "store")]

from bench_common import Figure, Options, run, say  # noqa: E402
from restore_grid import WAYS, Cell, Grid, sources  # noqa: E402

THROTTLES = (0.25, 0.5, 1.0, 2.0, 4.0)  # of prefill's own rate
LENGTHS = (512, 1024, 2048, 4096, 8000)
RELOAD_S = {False: 1.5, True: 0.8}  # by whether it is to be quick
ROUNDS, SHORT_REPEAT = 2, 3  # of all cells; of the fastest ones, in each round
OPENED_TOKENS, OPENED_REPEAT = 1000, 3
COLOURS = {"reload": "#7fc29b", "re-prefill": "#e8c36a", "both": "#8ab4de", "memory": "#d9d9d9"}

CELLS: list[Cell] = []
IN_MEMORY: dict[int, float] = {}  # seconds, by history length


def measure(options: Options) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"CHATKV_HOME": home, "CHATKV_CALIBRATE": "0"}
        from chatkv.paths import folders
        from chatkv.runtime import Runtime
        from chatkv_store.conversations import Conversations

        where = folders().make()
        with (
            Conversations(where.conversations) as conversations,
            Runtime(where, conversations) as runtime,
        ):
            say("calibrating ...")
            runtime.calibrate()
            yield _opened_then_typed(runtime, conversations)
            lengths = [n for n in LENGTHS if n < runtime.engine.max_tokens]
            try:
                _measure_grid(
                    runtime, Path(home), lengths[:2] if options.quick else lengths, options
                )
            except KeyboardInterrupt:
                yield from _grid_figures()
                raise
    yield from _grid_figures()


def _measure_grid(runtime: Any, home: Path, lengths: list[int], options: Options) -> None:
    with closing(Grid(runtime, home, max(lengths), RELOAD_S[options.quick])) as grid:
        throttled = sources(THROTTLES[1:4] if options.quick else THROTTLES)
        for source in throttled:
            grid.learn(source)
        for num_tokens in lengths:
            cells = [Cell(num_tokens, source) for source in throttled]
            CELLS.extend(cells)
            for cell in cells:
                grid.plan(cell)
            IN_MEMORY[num_tokens] = grid.in_memory(num_tokens, 3)
            for number in range(_rounds(num_tokens)):
                re_prefill_s = grid.re_prefill(num_tokens)
                for cell in cells:
                    cell.samples["re-prefill"].append(re_prefill_s)
                    _time(grid, cell, number)


def _rounds(num_tokens: int) -> int:
    """Long restores are steady, short ones are lost in whatever else the machine does."""
    return max(1, min(ROUNDS, 1024 // num_tokens))


def _time(grid: Grid, cell: Cell, number: int) -> None:
    is_throttled = cell.source.share is not None
    for _ in range(1 if is_throttled else SHORT_REPEAT):
        grid.time(cell, "both")
        if not is_throttled or not number:
            grid.time(cell, "reload")


def _opened_then_typed(runtime: Any, conversations: Any) -> Figure:
    """TTFT at Enter where the history was restored when the conversation was opened and the message
    prefilled while it was typed, beside that of a conversation which never left memory."""
    from chatkv.session.ahead import prefill_draft
    from chatkv.session.turn import TurnOptions

    say("opened, then typed ...")
    session = runtime.new_session(seed=1)
    text = "tide " * OPENED_TOKENS
    with runtime.open(session) as chat:
        chat.send(text, TurnOptions(max_tokens=2))
    kept, typed = [], []
    for number in range(OPENED_REPEAT):
        # Each question is new from its first word on: none finds KV of another.
        question = f"{number} captains sail to {number} islands, and each of them has a cat. Why?"
        with runtime.open(conversations.get_session(session.id)) as chat:
            chat.rewind(1)
            prefill_draft(chat)
            kept.append(chat.send(question, TurnOptions(max_tokens=1)).timing.ttft_ms)
        runtime.forget(session.id)
        with runtime.open(conversations.get_session(session.id)) as chat:
            chat.rewind(1)
            question = "And " + question
            for end in (0, len(question) // 2, len(question)):
                prefill_draft(chat, question[:end])
            typed.append(chat.send(question, TurnOptions(max_tokens=1)).timing.ttft_ms)
    return Figure(
        "opened, then typed: TTFT at Enter",
        statistics.median(typed),
        "ms",
        statistics.median(kept),
        "never left memory",
        goal=1 / 1.2,
        less_is_better=True,
    )


# --- figures ----------------------------------------------------------------------------------


def _grid_figures() -> Iterator[Figure]:
    """Of the cells that were timed with each plan."""
    CELLS[:] = [cell for cell in CELLS if all(cell.samples.values())]
    if CELLS:
        yield from _cell_figures()
        yield from _memory_figures()
        yield from _summary()


def _cell_figures() -> list[Figure]:
    figures = []
    for cell in CELLS:
        best = min(WAYS, key=lambda way: cell.seconds[way])
        ways = ", ".join(
            f"{way} {cell.seconds[way] * 1e3:.0f} ms (said {cell.predicted.get(way, 0) * 1e3:.0f})"
            for way in WAYS
        )
        partly = f"; reload timed on {cell.reload_tokens} tokens"
        figures.append(
            Figure(
                f"{cell.num_tokens} tokens, {cell.source.name}: {cell.chosen}",
                cell.seconds[cell.chosen] * 1e3,
                "ms",
                cell.seconds[best] * 1e3,
                f"best: {best}",
                goal=0.95,
                note=ways + (partly if cell.reload_tokens < cell.num_tokens else ""),
                less_is_better=True,
            )
        )
    return figures


def _memory_figures() -> list[Figure]:
    re_prefill_s = {cell.num_tokens: cell.seconds["re-prefill"] for cell in CELLS}
    figures = [
        Figure(
            f"{num_tokens} tokens, in memory",
            seconds * 1e3,
            "ms",
            re_prefill_s[num_tokens] * 1e3,
            "re-prefill",
            less_is_better=True,
        )
        for num_tokens, seconds in IN_MEMORY.items()
        if num_tokens in re_prefill_s
    ]
    note = "no GPU here: neither a history in its memory nor copies to it can be timed"
    return [*figures, Figure("history in GPU memory", None, "ms", note=note)]


def _summary() -> list[Figure]:
    regrets = [cell.regret for cell in CELLS]
    near = [cell for cell in CELLS if cell.within_4x]
    off = [abs(cell.error) for cell in CELLS]
    within = sum(regret <= 0.10 for regret in regrets) / len(regrets)
    figures = [
        Figure(
            "mean regret of the choice",
            100 * statistics.mean(regrets),
            "%",
            goal=5,
            goal_of="value",
            goal_is="<=",
        ),
        Figure("cells within 10% of the best", 100 * within, "%", goal=95, goal_of="value"),
        Figure("prediction of the choice: half are off by", 100 * statistics.median(off), "%"),
        Figure("prediction of the choice: off by at most", 100 * max(off), "%"),
    ]
    figures += [
        Figure(
            f"both ends, {cell.num_tokens} tokens, {cell.source.name}",
            cell.num_tokens / cell.seconds["both"],
            "tokens/s",
            cell.num_tokens / cell.seconds["reload"] + cell.num_tokens / cell.seconds["re-prefill"],
            "load rate + prefill rate",
            goal=0.85,
        )
        for cell in near
    ]
    return figures


def draw(path: Path) -> None:
    """The grid as a picture: which plan was chosen where, and what it took."""
    from matplotlib.figure import Figure as Picture
    from matplotlib.patches import Patch

    lengths = sorted({cell.num_tokens for cell in CELLS})
    rows = ["still in memory", *dict.fromkeys(cell.source.name for cell in CELLS)]
    picture = Picture(
        figsize=(2.2 + 1.5 * len(lengths), 1.9 + 0.62 * len(rows)), layout="constrained"
    )
    axes = picture.subplots()

    def box(num_tokens: int, row: str, colour: str, text: str) -> None:
        x, y = lengths.index(num_tokens), rows.index(row)
        axes.barh(y, 0.96, left=x - 0.48, height=0.92, color=colour)
        axes.text(x, y, text, ha="center", va="center", fontsize=10)

    for num_tokens in lengths:
        box(num_tokens, rows[0], COLOURS["memory"], _told(IN_MEMORY[num_tokens]))
    for cell in CELLS:
        faster = cell.seconds["re-prefill"] / cell.seconds[cell.chosen]
        text = _told(cell.seconds[cell.chosen]) + (f"\n{faster:.1f}x" if faster > 1.05 else "")
        box(cell.num_tokens, cell.source.name, COLOURS[cell.chosen], text)
    computed = {cell.num_tokens: cell.seconds["re-prefill"] for cell in CELLS}
    axes.set_xticks(
        range(len(lengths)),
        [f"{length:,} tokens\ncomputed in {_told(computed[length])}" for length in lengths],
    )
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0, labelsize=10)
    axes.spines[:].set_visible(False)
    axes.set_ylim(len(rows) - 0.5, -0.5)  # the first row on top
    axes.set_xlim(-0.52, len(lengths) - 0.48)
    picture.suptitle(
        "Until the first token: the plan that was chosen,\nand how many times faster it is than "
        "computing again",
        fontsize=11,
    )
    picture.legend(
        handles=[Patch(color=COLOURS[way], label=way) for way in WAYS],
        loc="outside lower center",
        ncols=len(WAYS),
        frameon=False,
        fontsize=10,
    )
    picture.savefig(path, dpi=110)


def _told(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds < 0.9995 else f"{seconds:.1f} s"


if __name__ == "__main__":
    run(__doc__.splitlines()[0], measure, draw)
