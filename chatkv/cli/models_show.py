"""`chatkv models show`: what a model is, what its KV takes, and how much memory it needs here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import click

from chatkv.cli.answer import Status
from chatkv.cli.complete import complete_known_model
from chatkv.cli.models import ORIGINS, find_known, known_models, row
from chatkv.cli.options import setting_option
from chatkv.cli.output import Output, count, output_options, plural, printable, size
from chatkv.paths import folders

if TYPE_CHECKING:
    from chatkv.engine.needs import Needs
    from chatkv.model.catalog import ModelFiles
    from chatkv.model.config import ModelConfig
    from chatkv.model.inventory import KnownModel
    from chatkv.model.quantise import Layout

DEFAULT_SESSIONS = 1


@click.command()
@click.argument("model", required=False, metavar="[MODEL]", shell_complete=complete_known_model)
@setting_option("dtype")
@setting_option("weights")
@click.option(
    "--context",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens of each conversation [default: the model's context].",
)
@click.option(
    "--sessions",
    type=click.IntRange(min=1),
    default=DEFAULT_SESSIONS,
    show_default=True,
    metavar="M",
    help="Conversations in memory at a time.",
)
@output_options
def show(
    output: Output,
    model: str | None,
    dtype: Literal["auto", "bfloat16", "float16", "float32"],
    weights: Literal["auto", "full", "own", "fp16", "int8", "fp8", "int4"],
    context: int | None,
    sessions: int,
) -> None:
    """Show what a model is, and the memory that it needs.

    Without MODEL, the one that a new conversation is held with. Nothing is downloaded or loaded;
    the files are read once to digest them.
    """
    from chatkv.model.catalog import find_model
    from chatkv.model.facts import facts
    from chatkv.model.own_codes import own_layouts

    place, found = folders(), known_models()
    wanted = _default() if model is None else model
    known = next((one for one in found.models if one.origin == "embedded"), None)
    known = find_known(found, wanted) if wanted is not None else known
    spec = known.spec if known is not None else wanted
    files = find_model(spec, place.cache, may_download=False)
    about = facts(files, known)
    config = about.config
    chosen, device = _chosen(dtype)
    context = min(context or config.max_position, config.max_position)
    taken, why = _taken(files, chosen, device, weights)
    own = own_layouts(files, config)
    layouts = own if taken == "own" else {}
    question = _Question(files, config, chosen, device, context, sessions, own)
    needs, free = question.needs(taken)
    choices = _choices(question)
    values: dict[str, Any] = {
        **(row(known) if known is not None else {"model": files.name, "path": str(files.path)}),
        "architecture": config.architecture,
        "parameters": about.num_parameters,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
        "context": config.max_position,
        "sliding_window": config.sliding_window,
        "template": about.template,
        "computes_in": chosen,
        "weights": taken,
        "weights_why": why,
        "matrices": _matrices(files, config, layouts) if taken == "own" else [],
        "device": device,
        "kv_bytes_per_token": _kv_bytes(config, chosen, files),
        "digest": _digest(files),
        "config_digest": config.digest().hex(),
        "mtp": _mtp(files),
        "memory": {
            "context": context,
            "sessions": sessions,
            "program_bytes": needs.program,
            "weights_bytes": needs.weights,
            "work_bytes": needs.work,
            "kv_bytes": needs.kv,
            "total_bytes": needs.total,
            "free_bytes": free,
            "kv_room_bytes": needs.room,
            "sessions_that_fit": needs.num_sessions,
            "fits": needs.fits,
            "choices": choices,
        },
    }
    if output.is_human:
        _tell(output, values, known, needs)
    else:
        output.record(values)


def _default() -> str | None:
    from chatkv.cli.options import values_in_force

    value = values_in_force()["model"].value
    return None if value is None else str(value)


def _chosen(dtype: str) -> tuple[Any, str]:
    """What the model would be computed in, and where."""
    from chatkv.engine.device import choose_device
    from chatkv.model.dtype import choose_dtype

    device = choose_device()
    place = folders().make()  # where the choice is remembered
    return (choose_dtype(place.cache, device) if dtype == "auto" else dtype), device.type


def _taken(files: ModelFiles, dtype: Any, device: str, weights: str) -> tuple[str, str]:
    """How weights would be stored, and why. Nothing is measured for it."""
    import torch

    from chatkv.engine.auto_weights import remembered_weights

    if weights != "auto":
        return weights, "as was asked for"
    chosen = remembered_weights(files, dtype, torch.device(device), folders())
    if chosen is None:
        return "full", "until it is found out whether others are better, when it is first used"
    return chosen.weights, chosen.why


@dataclass(frozen=True)
class _Question:
    """What the memory is asked for of. own: the layouts of codes that the files hold."""

    files: ModelFiles
    config: ModelConfig
    dtype: Any
    device: str
    context: int
    sessions: int
    own: Mapping[str, Layout]

    def needs(self, weights: str) -> tuple[Needs, int]:
        """The memory that is needed with such weights, and how much is free."""
        from chatkv.engine.admission import asked_for, itemsize_of
        from chatkv.engine.needs import needs_on_cpu, needs_on_gpu
        from chatkv.process import available_bytes
        from chatkv.runtime import POOL_CONVERSATIONS, POOL_SHARE_OF_MEMORY

        config, itemsize, most = self.config, itemsize_of(self.dtype), POOL_CONVERSATIONS
        lengths = (self.context, self.sessions, most)
        asked = asked_for(self.files, config, self.dtype, weights, self.own, *lengths)
        if self.device == "cpu":
            free = available_bytes()
            return needs_on_cpu(config, itemsize, asked, free, POOL_SHARE_OF_MEMORY), free
        import torch

        from chatkv.restore.staging import DEVICE_BYTES

        free, _ = torch.cuda.mem_get_info()
        return needs_on_gpu(config, itemsize, asked, free, DEVICE_BYTES), free


def _choices(question: _Question) -> list[dict[str, Any]]:
    """What each kind of weights takes, whether that is free, and what of its quality is known."""
    from chatkv.engine.admission import KINDS
    from chatkv.session.weights_quality import known_qualities

    measured = {
        entry.get("weights"): entry
        for entry in known_qualities(folders().models).values()
        if entry.get("model") == question.files.name and entry.get("dtype") == question.dtype
    }
    found = []
    for kind in KINDS:
        if kind == "own" and not question.own:
            continue
        needs, free = question.needs(kind)
        quality = measured.get(kind)
        found.append(
            {
                "weights": kind,
                "weights_bytes": needs.weights,
                "total_bytes": needs.total,
                "fits": needs.fits and needs.total <= free + needs.resident,
                "quality": quality,
            }
        )
    return found


def _matrices(
    files: ModelFiles, config: ModelConfig, layouts: Mapping[str, Layout]
) -> list[dict[str, Any]]:
    """How many projections are what in the files, and what that is stored as."""
    from chatkv.model.own_codes import coded_sources
    from chatkv.model.quantise import CodedSource, is_quantised

    kinds: Counter[tuple[str, str]] = Counter()
    for source in coded_sources(files, config):
        if is_quantised(source.name):
            told = source.told if isinstance(source, CodedSource) else "dense"
            layout = layouts.get(source.name)
            kinds[told, "dense" if layout is None else str(layout)] += 1
    return [
        {"count": number, "in_file": told, "stored": stored}
        for (told, stored), number in kinds.most_common()
    ]


def _kv_bytes(config: ModelConfig, dtype: Any, files: ModelFiles) -> dict[str, float | None]:
    """Codec -> bytes of stored KV for each token; None where that depends on what is said, and was
    not measured on this model yet."""
    from chatkv.session.codec_record import ratios
    from chatkv_store.codec_rates import bytes_per_token
    from chatkv_store.layout import KVLayout

    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, dtype)
    known = ratios(folders().models, files.name, dtype)
    measured = {name: layout.bytes_per_token / ratio for name, ratio in known.items()}
    return {**bytes_per_token(layout), **measured}


def _digest(files: ModelFiles) -> str:
    """Of the weights' files: what KV is keyed by, beside how they are computed with."""
    from chatkv.model.identity import weights_digest

    status = Status()
    try:
        return weights_digest(files.files, folders().models, status.progress).hex()
    finally:
        status.clear()


def _mtp(files: ModelFiles) -> dict[str, Any] | None:
    """The modules that come with this package for these weights, and how often they are right."""
    from chatkv.model.mtp_file import is_shipped_for, read_about, shipped_file

    if not is_shipped_for(bytes.fromhex(_digest(files))):
        return None
    about = read_about(shipped_file())
    return {"kind": about.kind, "acceptance": about.acceptance, "trained_on": about.trained_on}


def _tell(output: Output, values: dict[str, Any], known: KnownModel | None, needs: Needs) -> None:
    memory, kv = values["memory"], values["kv_bytes_per_token"]
    output.line(printable(values["model"]), bold=True)
    shape = (
        f"{values['layers']} layers of {count(values['hidden_size'])}, {values['heads']} heads, "
        f"{values['kv_heads']} of KV, of {values['head_dim']}"
    )
    template, window = values["template"], values["sliding_window"]
    output.fields(
        [
            ("from", f"{ORIGINS[known.origin]}, {known.path}" if known else values["path"]),
            ("architecture", values["architecture"]),
            ("parameters", _millions(values["parameters"])),
            ("shape", shape),
            ("vocabulary", count(values["vocabulary"])),
            ("context", plural(values["context"], "token")),
            ("window", plural(window, "token") if window else ""),
            (
                "template",
                f"its own, {plural(len(template), 'character')}" if template else "ChatML",
            ),
            ("computes in", f"{values['computes_in']} on {values['device']}"),
            ("weights", f"{values['weights']}: {values['weights_why']}"),
            *[("matrices", _told_matrices(kind)) for kind in values["matrices"]],
            ("digest", values["digest"][:32]),
            ("drafts", _drafts(values["mtp"])),
        ]
    )
    output.line()
    output.line("KV on the disk, for each token", bold=True)
    output.fields([(name, _per_token(number)) for name, number in kv.items()])
    output.line()
    length = f"{plural(memory['sessions'], 'conversation')} of {count(memory['context'])} tokens"
    output.line(f"Memory for {length}", bold=True)
    output.fields(
        [
            *([("the program", size(needs.program))] if needs.program else []),
            ("weights", size(needs.weights)),
            ("a step's work", size(needs.work)),
            ("KV", size(needs.kv)),
            ("together", size(needs.total)),
            ("free here", size(memory["free_bytes"])),
            ("KV may take", f"{size(needs.room)}: {_fitting(needs.num_sessions)} of that length"),
        ]
    )
    output.line()
    output.line("The same with other --weights", bold=True)
    output.fields([(choice["weights"], _told_choice(choice)) for choice in memory["choices"]])
    if not needs.fits:
        output.note(
            "that does not fit: the conversations used longest ago leave memory for others, and "
            "come back from the disk"
            if needs.num_sessions
            else f"that does not fit: a conversation may have {_most_tokens(values, needs)} here"
        )


def _drafts(mtp: dict[str, Any] | None) -> str:
    if mtp is None:
        return ""
    rates = ", ".join(f"{rate:.0%}" for rate in mtp["acceptance"]["greedy"])
    return f"a module of its own; its first, second, … guess is right: {rates}"


def _told_choice(choice: dict[str, Any]) -> str:
    told = f"{size(choice['total_bytes'])}, of which weights {size(choice['weights_bytes'])}"
    told += "" if choice["fits"] else ": does not fit"
    quality = choice["quality"]
    if quality is not None:
        change = 100 * (quality["perplexity"] / quality["full_perplexity"] - 1)
        told += f"; perplexity {change:+.2f}%, KL {quality['kl']:.4f}"
        told += f", top-1 {100 * quality['top1_agreement']:.1f}%"
    return told


def _told_matrices(kind: dict[str, Any]) -> str:
    return f"{count(kind['count'])} stored as {kind['stored']} (in the file: {kind['in_file']})"


def _fitting(number: int) -> str:
    return plural(number, "conversation") if number else "not one conversation"


def _most_tokens(values: dict[str, Any], needs: Needs) -> str:
    memory = values["memory"]
    per_token = needs.kv / memory["sessions"] / memory["context"]
    return plural(int(needs.room / per_token), "token")


def _per_token(number: float | None) -> str:
    if number is None:
        return "depends on what is said: `chatkv codec measure`"
    return size(round(number))


def _millions(number: int) -> str:
    if number >= 1e9:
        return f"{number / 1e9:.2f} billion"
    return f"{number / 1e6:.1f} million"
