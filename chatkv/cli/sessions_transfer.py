"""`chatkv sessions export` and `import`: conversations as files of other kinds, without KV."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from chatkv.cli.output import count, plural, printable
from chatkv.cli.stores import complete_session, open_conversations
from chatkv.errors import UsageError

if TYPE_CHECKING:
    from chatkv.formats.files import Found
    from chatkv_store.conversations import Conversations

Written = Literal["markdown", "json", "messages"]
_ENDINGS: dict[str, Written] = {".md": "markdown", ".markdown": "markdown", ".json": "json"}
_KINDS = ("auto", "markdown", "json", "messages", "chatgpt", "llm")
# Turns that are stored in one transaction, so that a chat beside it waits for no longer than that.
BATCH_TURNS = 4000


@click.command()
@click.argument("session", shell_complete=complete_session, metavar="SESSION")
@click.option(
    "--format",
    "kind",
    type=click.Choice(get_args(Written)),
    help="[default: what FILE's name ends with, else markdown]",
)
@click.option(
    "-o",
    "--output-file",
    "file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write it [default: standard output].",
)
@click.option("--tokens", is_flag=True, help="With the token ids, in json.")
@click.option("-f", "--force", is_flag=True, help="Overwrite FILE.")
def export(
    session: str, kind: Written | None, file: Path | None, tokens: bool, force: bool
) -> None:
    """Write a conversation's text to a file.

    markdown is for reading, messages for other programs; both hold the conversation as it stands.
    json holds every branch of it with times and settings. All can be imported again. With its KV,
    `chatkv cache export` takes it along.
    """
    chosen = kind or _ENDINGS.get(file.suffix.lower() if file else "", "markdown")
    if tokens and chosen != "json":
        raise UsageError("--tokens is for --format json: the others are text alone")
    with open_conversations() as store:
        found = store.get_session(session)
        values = store.export_text(found.id, branches=chosen == "json")
    text = _written(values, chosen, tokens)
    if file is None:
        sys.stdout.flush()
        # Whatever the terminal's encoding is, a file that this is sent into is UTF-8.
        sys.stdout.buffer.write(text.encode("utf-8", "replace"))
        sys.stdout.buffer.flush()
        return
    if file.exists() and not force:
        raise UsageError(f"{file} exists: take another name, or add -f")
    _write(file, text)
    click.echo(f"{file}: {plural(len(values['turns']), 'turn')}", err=True)


def _written(values: dict[str, Any], kind: Written, tokens: bool) -> str:
    from chatkv.formats import markdown, messages, own_json
    from chatkv.formats.told import messages_of

    if kind == "json":
        values = values if tokens else own_json.without_ids(values)
        return json.dumps(values, ensure_ascii=False, indent=1) + "\n"
    said = messages_of(values)
    if kind == "messages":
        return messages.write(said)
    return markdown.write(values["title"], said, values["model"], values["created_at"])


def _write(path: Path, text: str) -> None:
    """The whole file or none, readable by its owner alone."""
    partial = path.with_name(path.name + ".partial")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
            out.write(text.encode("utf-8", "replace"))
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@click.command("import")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--format", "kind", type=click.Choice(_KINDS), default="auto", help="What FILE is [auto]."
)
@click.option("--again", is_flag=True, help="Also what was imported before: as another one.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each of them.")
def import_(files: tuple[str, ...], kind: Any, again: bool, as_json: bool) -> None:
    """Take conversations from files of chatkv or of other programs.

    FILE is what `export` writes, a list of messages, ChatGPT's export (its .zip, or the
    conversations.json in it), logs of llm (logs.db, or what `llm logs --json` prints), or - for
    standard input. Prints the ids of the new sessions. What was imported before is left as it is.
    """
    from chatkv.formats.files import conversations
    from chatkv.formats.told import NotUnderstood

    with open_conversations() as store:
        run = _Import(store, again, as_json)
        for name in files:
            with _readable(name) as path:
                try:
                    for found in conversations(path, kind):
                        run.add(found, name)
                except NotUnderstood as error:
                    run.refuse(name, "", str(error))
                except OSError as error:
                    run.refuse(name, "", error.strerror or str(error))
                run.store()
    run.sum_up()
    if run.num_refused:
        raise SystemExit(1)


@contextmanager
def _readable(name: str) -> Iterator[Path]:
    """The file, or standard input as one: what it is shows in its first bytes."""
    if name != "-":
        yield Path(name)
        return
    with tempfile.NamedTemporaryFile() as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.flush()
        yield Path(copy.name)


@dataclass
class _Import:
    """Stores conversations in batches, and tells of each."""

    conversations: Conversations
    again: bool
    as_json: bool
    num_refused: int = 0
    num_skipped: int = 0
    num_empty: int = 0
    _waiting: list[tuple[dict[str, Any], dict[str, int]]] = field(default_factory=list)
    _imported: list[tuple[str, int]] = field(default_factory=list)  # titles and turns
    _left_out: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._known = self.conversations.sources()

    def add(self, found: Found, origin: str) -> None:
        """Take one conversation, unless it is here already."""
        from chatkv_store.errors import StoreDamaged, StoreVersionError
        from chatkv_store.importing import check

        if found.refusal:
            return self.refuse(origin, found.title, found.refusal)
        if found.is_empty:
            self.num_empty += 1
            return None
        values = found.values(self.conversations.now_s())
        try:
            check(values, "it")
        except (StoreDamaged, StoreVersionError) as error:
            return self.refuse(origin, found.title, str(error))
        source = values["settings"]["source"]
        if source in self._known and not self.again:
            return self._skip(self._known[source], values["title"])
        self._known[source] = ""  # it may be in these files twice
        self._waiting.append((values, found.left_out))
        if sum(len(values["turns"]) for values, _ in self._waiting) >= BATCH_TURNS:
            self.store()
        return None

    def store(self) -> None:
        """Write what was taken, in one transaction."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        made = self.conversations.import_all([values for values, _ in waiting], "it")
        for session, (values, left_out) in zip(made, waiting, strict=True):
            self._known[values["settings"]["source"]] = session.id
            self._imported.append((session.title, len(values["turns"])))
            for kind, number in left_out.items():
                self._left_out[kind] = self._left_out.get(kind, 0) + number
            if self.as_json:
                self._tell("imported", session.id, session.title, left_out=left_out)
            else:
                click.echo(session.id)

    def refuse(self, origin: str, title: str, why: str) -> None:
        """Say why a file, or a conversation in it, was not taken."""
        self.num_refused += 1
        which = f'{origin}, "{title}"' if title else origin
        click.echo(f"chatkv: {printable(' '.join(f'{which}: {why}'.split()))}", err=True)
        if self.as_json:
            self._tell("refused", None, title, file=origin, reason=why)

    def sum_up(self) -> None:
        """Say what came of all files."""
        if self.as_json:
            return
        parts = []
        if len(self._imported) == 1:
            title, num_turns = self._imported[0]
            parts.append(f'imported "{printable(title)}", {plural(num_turns, "turn")}')
        elif self._imported:
            num_turns = sum(number for _, number in self._imported)
            conversations = plural(len(self._imported), "conversation")
            parts.append(f"imported {conversations}, {plural(num_turns, 'turn')}")
        if self.num_skipped > 1:
            parts.append(f"{count(self.num_skipped)} were here already (--again takes them twice)")
        if self.num_empty:
            parts.append(f"nothing was said in {plural(self.num_empty, 'conversation')}")
        if self._left_out:
            kinds = ", ".join(
                f"{count(number)} × {printable(kind)}"
                for kind, number in sorted(self._left_out.items())
            )
            parts.append(f"left out: {kinds}")
        if parts:
            click.echo("; ".join(parts), err=True)

    def _skip(self, session: str, title: str) -> None:
        self.num_skipped += 1
        if self.as_json:
            self._tell("skipped", session or None, title)
        elif self.num_skipped == 1:
            where = f"it is session {session}" if session else "it is in these files twice"
            again = "--again imports it once more"
            click.echo(f'"{printable(title)}" was not imported: {where} ({again})', err=True)

    def _tell(self, state: str, session: str | None, title: str, **more: Any) -> None:
        row = {"state": state, "session": session, "title": title, **more}
        sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n")
