"""`chatkv models measure`: what weights of fewer bits cost in quality."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from chatkv.cli.answer import Status
from chatkv.cli.codec import measured, read_text, tell_quality, text_option
from chatkv.cli.complete import complete_known_model
from chatkv.cli.models import find_known, known_models
from chatkv.cli.options import setting_option
from chatkv.cli.output import Output, output_options
from chatkv.cli.table import Column
from chatkv.paths import folders

if TYPE_CHECKING:
    from chatkv.model.prepared import Quantised

KINDS: tuple[Quantised, ...] = ("own", "fp16", "int8", "fp8", "int4")


@click.command()
@click.argument("model", metavar="MODEL", required=False, shell_complete=complete_known_model)
@setting_option("dtype")
@text_option
@click.option(
    "--tokens",
    type=click.IntRange(min=2),
    default=1024,
    show_default=True,
    metavar="N",
    help="How much of the text to read.",
)
@output_options
def measure(output: Output, model: str | None, dtype: str, text: Path | None, tokens: int) -> None:
    """Measure what each kind of --weights costs on a text, against full ones.

    PERPLEXITY is how much worse the text is predicted, KL how far predictions move (nats), TOP-1
    how often the likeliest token stays the same. Own are the codes of a file that has some; of
    these, int4 takes over the ones of 4 bits. Without MODEL, the embedded one.
    """
    values = measured(lambda status: _measure(read_text(text), model, dtype, tokens, status))
    columns = [Column("WEIGHTS", lambda row: row["weights"], colour="cyan")]
    tell_quality(output, values, "weights", columns)


def _measure(text: str, model: str | None, dtype: Any, tokens: int, status: Status) -> Any:
    """Measure, remember, and what programs get to see of it."""
    import torch

    from chatkv.model.catalog import find_model
    from chatkv.model.decoder import Decoder
    from chatkv.model.dtype import choose_dtype
    from chatkv.model.own_codes import own_layouts
    from chatkv.model.prepared import prepare
    from chatkv.model.tokenizer import Tokenizer
    from chatkv.model.weights import load_weights
    from chatkv.process import prepare_to_compute
    from chatkv.session.weights_quality import WeightsQuality, differences, remember

    prepare_to_compute()
    place = folders().make()
    known = find_known(known_models(), model) if model is not None else None
    files = find_model(known.spec if known is not None else model, place.cache)
    chosen = choose_dtype(place.cache, torch.device("cpu")) if dtype == "auto" else dtype
    full = prepare(files, chosen, place.models, status.progress)
    has_own = bool(own_layouts(files, full.config))
    kinds = [kind for kind in KINDS if has_own or kind != "own"]
    made = {kind: prepare(files, chosen, place.models, status.progress, kind) for kind in kinds}
    ids = Tokenizer.from_prepared(full).encode(text[: 16 * tokens])[:tokens]
    rows = []
    whole = Decoder(full.config, load_weights(full), len(ids))
    for kind in kinds:  # one at a time beside the full one: two lie in memory at most
        other = Decoder(full.config, load_weights(made[kind]), len(ids))
        (found,) = differences(whole, [other], ids, status.progress)
        scored = len(ids) - 1
        quality = WeightsQuality(
            full.name,
            chosen,
            kind,
            found.perplexity(scored),
            found.exact_perplexity(scored),
            max(0.0, found.kl / scored),
            found.agreed / scored,
            scored,
        )
        remember(place.models, made[kind].weights_digest, quality)
        rows.append(quality.to_json())
    return {"model": full.name, "dtype": chosen, "tokens": len(ids), "weights": rows}
