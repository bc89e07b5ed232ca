"""`chatkv codec`: what each way to store KV saves, and what it costs in quality."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import click

from chatkv.cli.answer import Status
from chatkv.cli.options import setting_option
from chatkv.cli.output import Output, output_options
from chatkv.cli.table import Column
from chatkv.errors import UsageError
from chatkv.paths import folders

text_option = click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A text like those you talk about [default: Python's own help pages].",
)


@click.group()
def codec() -> None:
    """Measure what KV codecs save, and what they cost."""


@codec.command()
@setting_option("model", "-m")
@setting_option("dtype")
@text_option
@click.option(
    "--tokens",
    type=click.IntRange(min=128),
    default=2048,
    show_default=True,
    metavar="N",
    help="How much of the text to read.",
)
@output_options
def measure(
    output: Output,
    model: str | None,
    dtype: Literal["auto", "bfloat16", "float16", "float32"],
    text: Path | None,
    tokens: int,
) -> None:
    """Measure every codec on your model.

    The KV of the first half of a text is encoded and decoded, and the second half read on top of
    it. RATIO is how much smaller KV gets. PERPLEXITY is how much worse the second half is
    predicted, KL how far predictions move (nats), TOP-1 how often the likeliest token stays the
    same. `chatkv cache du` shows the result too.
    """
    values = measured(lambda status: _measure(read_text(text), model, dtype, tokens, status))
    columns = [
        Column("CODEC", lambda row: row["codec"], colour="cyan"),
        Column("RATIO", lambda row: f"{row['ratio']:.2f}x", is_number=True),
    ]
    tell_quality(output, values, "codecs", columns)


def measured(measure: Callable[[Status], dict[str, Any]]) -> dict[str, Any]:
    """What `measure` finds, its progress shown meanwhile."""
    status = Status()
    status.show("starting")
    try:
        return measure(status)
    finally:
        status.clear()


def tell_quality(
    output: Output, values: dict[str, Any], name: str, columns: Sequence[Column]
) -> None:
    """Show values[name], one row for each thing that was measured on a text: `columns`, and how far
    predictions moved."""
    if not output.is_human:
        output.record(values)
        return
    from chatkv.session.codec_record import percent

    output.line(f"{values['model']}, {values['dtype']}, {values['tokens']} tokens", bold=True)
    output.table(
        values[name],
        [
            *columns,
            Column("PERPLEXITY", lambda row: percent(row["perplexity_change"]), is_number=True),
            Column("KL", lambda row: f"{row['kl']:.2g}", is_number=True),
            Column("TOP-1", lambda row: f"{100 * row['top1_agreement']:.1f}%", is_number=True),
        ],
    )


def read_text(file: Path | None) -> str:
    if file is None:
        from pydoc_data.topics import topics

        return "\n".join(topics.values())
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{file} is no UTF-8 text") from None


def _measure(text: str, model: str | None, dtype: Any, tokens: int, status: Status) -> Any:
    """Measure, remember, and what programs get to see of it."""
    from chatkv.runtime import Runtime
    from chatkv.session.codec_quality import measure_codecs
    from chatkv.session.codec_record import remember
    from chatkv_store.conversations import Conversations

    place = folders()
    with (
        Conversations(place.make().conversations) as conversations,
        Runtime(place, conversations, model, dtype, status.progress, device="cpu") as runtime,
    ):
        ids = runtime.tokenizer.encode(text[: 16 * tokens])[:tokens]
        qualities = measure_codecs(
            runtime.engine.decoder, runtime.layout, ids, on_progress=status.progress
        )
        name, chosen = runtime.prepared.name, runtime.layout.dtype
        remember(place.models, name, chosen, qualities, runtime.namespace_of)
    return {
        "model": name,
        "dtype": chosen,
        "tokens": len(ids),
        "codecs": [quality.to_json() for quality in qualities],
    }
