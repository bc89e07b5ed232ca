"""`chatkv cache explain --messages`: which messages of a client's request are known here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from chatkv.cli.options import setting_option
from chatkv.cli.output import Output, count, plural, printable
from chatkv.cli.stores import open_blocks, open_conversations
from chatkv.cli.table import Column
from chatkv.paths import folders

if TYPE_CHECKING:
    from chatkv.server.foreseen import Foreseen
    from chatkv.session.messages import Message

Command = TypeVar("Command", bound=Callable[..., Any])

_HITS = {
    "chain": "found by its messages",
    "bytes": "found by the text that the model reads",
    "blocks": "not found; others begin with the same tokens",
    "none": "not found",
}


def request_options(command: Command) -> Command:
    """The options that name a request and the model that it asks: file, model, dtype."""
    file = click.option(
        "--messages",
        "file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Of a request instead: its body as JSON, or a list of messages.",
    )
    return file(setting_option("model", "-m")(setting_option("dtype")(command)))


def explain_request(output: Output, file: Path, model: str | None, dtype: Any) -> None:
    """Show what a request with the messages of `file` would find, and where it parts from that."""
    from chatkv.cli.answer import Status
    from chatkv.model.catalog import find_model
    from chatkv.model.prepared import prepare
    from chatkv.server.foreseen import foresee, read_request

    messages, tools = read_request(file)
    place, status = folders(), Status()
    files = find_model(model, place.cache)
    if dtype == "auto":
        from chatkv.engine.device import choose_device
        from chatkv.model.dtype import choose_dtype

        dtype = choose_dtype(place.cache, choose_device(None))
    prepared = prepare(files, dtype, place.make().models, status.progress)
    status.clear()
    with open_conversations() as store:
        blocks = open_blocks()
        try:
            found = foresee(prepared, store, blocks, messages, tools)
        finally:
            if blocks is not None:
                blocks.close()
        turn = found.turn
        session = store.get_session(turn.session_id) if turn is not None else None
    rows = _rows(messages, found)
    if not output.is_human:
        output.record(
            {
                "hit": found.hit,
                "messages": len(messages),
                "known_messages": found.num_known,
                "session": session.id if session is not None else None,
                "turn": turn.index if turn is not None else None,
                "tokens": found.num_tokens,
                "stored_tokens": found.num_stored,
                "said_there_instead": list(found.others),
                "rows": rows,
            }
        )
        return
    where = ""
    if session is not None and turn is not None:
        where = f': "{printable(session.title) or "untitled"}", turn {turn.index} ({session.id})'
    output.line(_HITS[found.hit] + where, bold=True)
    output.line(
        f"{count(found.num_stored)} of {plural(found.num_tokens, 'token')} are on the disk; "
        f"{plural(len(messages) - found.num_known, 'message')} of {len(messages)} to be read"
    )
    output.line()
    output.table(
        rows,
        [
            Column("#", lambda row: str(row["number"]), is_number=True),
            Column("ROLE", lambda row: row["role"]),
            Column("KNOWN", lambda row: "yes" if row["is_known"] else "no"),
            Column("TEXT", lambda row: printable(row["text"]), is_flexible=True),
        ],
    )
    for text in found.others:
        output.note(f"said there instead of message {found.num_known + 1}: {printable(text)}")


def _rows(messages: tuple[Message, ...], found: Foreseen) -> list[dict[str, Any]]:
    return [
        {
            "number": number,
            "role": message["role"],
            "is_known": number <= found.num_known,
            "text": " ".join(str(message["content"]).split())[:200],
        }
        for number, message in enumerate(messages, start=1)
    ]
