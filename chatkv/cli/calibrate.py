"""`chatkv calibrate`: what loading and computing cost on this machine, measured or remembered."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import click

from chatkv.cli.answer import Status
from chatkv.cli.device import device_option
from chatkv.cli.options import setting_option
from chatkv.cli.output import Output, output_options
from chatkv.cli.table import Column
from chatkv.paths import folders

if TYPE_CHECKING:
    from chatkv.restore.calibration import Calibration, Sample
    from chatkv.restore.cost import CostModel

_TOKENS = 4096  # whose loading and computing is shown
_ANSWERS = 4  # whose step is shown


@click.command()
@setting_option("model", "-m")
@setting_option("dtype")
@device_option
@click.option("--show", is_flag=True, help="Show what is known, measure nothing.")
@output_options
def calibrate(
    output: Output,
    model: str | None,
    dtype: Literal["auto", "bfloat16", "float16", "float32"],
    show: bool,
) -> None:
    """Measure what reloading and recomputing cost here.

    Done by itself when a model is first used, and corrected by every turn; this repeats it.
    """
    if show:
        _show(output)
        return
    status = Status()
    status.show("starting")
    try:
        label, found = _measure(model, dtype, status)
    finally:
        status.clear()
    if not output.is_human:
        output.record({"model": label, **_values(found.cost), "measured": _measured(found)})
        return
    output.line(label, bold=True)
    output.table(_measured(found), _columns())


def _measure(
    model: str | None, dtype: Literal["auto", "bfloat16", "float16", "float32"], status: Status
) -> tuple[str, Calibration]:
    from chatkv.runtime import Runtime
    from chatkv_store.conversations import Conversations

    where = folders().make()
    with (
        Conversations(where.conversations) as conversations,
        Runtime(where, conversations, model, dtype, status.progress) as runtime,
    ):
        found = runtime.calibrate(status.progress, every_codec=True)
        return f"{runtime.prepared.name}, {runtime.prepared.dtype}", found


def _show(output: Output) -> None:
    from chatkv.restore.cost import CostFile

    entries = CostFile(folders().costs).entries()
    rows = [{"model": label, **_values(cost)} for label, cost in entries.values()]
    output.rows(
        rows,
        [
            Column("MODEL", lambda row: row["model"], is_flexible=True, colour="cyan"),
            Column("LOAD", lambda row: _rate(row["load_4k_s"]), is_number=True),
            Column("COLD", lambda row: _rate(row["load_cold_4k_s"]), is_number=True),
            Column("ERROR", lambda row: _error(row["load_error"]), is_number=True),
            Column("PREFILL", lambda row: _rate(row["prefill_4k_s"]), is_number=True),
            Column("ERROR", lambda row: _error(row["prefill_error"]), is_number=True),
            Column("STEP", lambda row: _ms(row["step_s"]), is_number=True),
            Column("BESIDE", lambda row: _tokens(row["prefill_beside"]), is_number=True),
            Column("SEEN", lambda row: f"{row['num_observations']:,}", is_number=True),
        ],
        empty="nothing is measured yet: `chatkv calibrate`, or just chat",
    )
    if rows and output.is_human:
        output.note(
            "tokens a second for 4,096 tokens; LOAD: of pages that are in memory, COLD: that are "
            "not, as each turn finds them; ERROR: how far predictions were off lately; STEP: "
            f"one token of {_ANSWERS} answers; BESIDE: tokens of prompts that are read beside it; "
            "SEEN: measurements and corrections so far"
        )


def _values(cost: CostModel) -> dict[str, Any]:
    steps = cost.steps
    return asdict(cost) | {
        "step_s": steps.plain_s(_ANSWERS) if steps else None,
        "prefill_beside": steps.prefill_tokens(_ANSWERS) if steps else None,
        "prefill_4k_s": cost.prefill_s(0, _TOKENS),
        "load_4k_s": cost.load_s(_TOKENS),
        "load_cold_4k_s": None if cost.cold_s_per_token is None else _cold(cost).load_s(_TOKENS),
    }


def _measured(found: Calibration) -> list[dict[str, Any]]:
    """Each measurement beside what the fitted model says."""
    cost = found.cost
    rows = [
        {"what": "prefill", "tokens": s.num_tokens, "seconds": s.seconds}
        | {"fitted_s": cost.prefill_s(0, s.num_tokens)}
        for s in found.prefill
    ]
    rows += [
        {"what": "decode, answers", "tokens": s.num_tokens, "seconds": s.seconds}
        | {"fitted_s": cost.steps.plain_s(s.num_tokens) if cost.steps else None}
        for s in found.steps
    ]
    for number, loads in enumerate(found.loads):
        codec, cost = loads.codec, found.cost_of(loads) if number else found.cost
        rows += [_load(f"load, {codec}", s, cost.load_s(s.num_tokens)) for s in loads.warm]
        if loads.cold is not None:
            fitted_s = _cold(cost).load_s(loads.cold.num_tokens)
            rows.append(_load(f"load, {codec}, cold", loads.cold, fitted_s))
    return rows


def _cold(cost: CostModel) -> CostModel:
    return cost.with_cold(1.0)


def _load(what: str, sample: Sample, fitted_s: float | None) -> dict[str, Any]:
    return {
        "what": what,
        "tokens": sample.num_tokens,
        "seconds": sample.seconds,
        "fitted_s": fitted_s,
        "bytes_per_token": round(sample.num_bytes / sample.num_tokens),
    }


def _columns() -> list[Column]:
    return [
        Column("WHAT", lambda row: row["what"], colour="cyan"),
        Column("TOKENS", lambda row: f"{row['tokens']:,}", is_number=True),
        Column("TOOK", lambda row: f"{1e3 * row['seconds']:.1f} ms", is_number=True),
        Column("MODEL SAYS", lambda row: _ms(row["fitted_s"]), is_number=True),
        Column("BYTES/TOKEN", lambda row: _bytes(row.get("bytes_per_token")), is_number=True),
        Column("RATE", lambda row: f"{row['tokens'] / row['seconds']:,.0f}/s", is_number=True),
    ]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f} ms"


def _tokens(count: float | None) -> str:
    return "" if count is None else f"{count:.0f}"


def _bytes(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes:,}"


def _rate(seconds: float | None) -> str:
    return "" if seconds is None else f"{_TOKENS / max(seconds, 1e-9):,.0f}"


def _error(error: float | None) -> str:
    return "" if error is None else f"±{100 * error:.0f}%"
