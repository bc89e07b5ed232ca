"""What a shell is offered for a conversation or a model.

Nobody waits for it gladly, so it imports no torch, and nobody sees its errors, so it has none: what
cannot be read completes nothing. It makes no file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from chatkv.paths import folders

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Completer = Callable[[click.Context, click.Parameter, str], "list[CompletionItem[Any]]"]
MAX_ITEMS = 200  # more would help nobody to choose


def _quietly(found: Callable[[str], Iterator[CompletionItem[Any]]]) -> Completer:
    def complete(
        context: click.Context, parameter: click.Parameter, incomplete: str
    ) -> list[CompletionItem[Any]]:
        try:
            return [item for item, _ in zip(found(incomplete), range(MAX_ITEMS), strict=False)]
        except Exception:  # a completion that fails is none
            return []

    return complete


@_quietly
def complete_session(incomplete: str) -> Iterator[CompletionItem[Any]]:
    """Ids that begin so, and those whose titles have it, each with its title beside it."""
    from click.shell_completion import CompletionItem

    from chatkv_store.conversations import Conversations

    path = folders().conversations
    if not path.is_file():
        return
    wanted = incomplete.strip("\"'").casefold()
    with Conversations(path) as store:
        short = store.short_ids()
        sessions = store.list_sessions()
    for session in sessions:
        title = _one_line(session.title)
        if session.id.startswith(wanted):
            yield CompletionItem(short[session.id], help=title)
        elif wanted in title.casefold():
            # fish keeps what resembles the word that is being typed, and takes no comma.
            if not _is_fish():
                yield CompletionItem(short[session.id], help=title)
            elif "," not in title:
                yield CompletionItem(title, help=short[session.id])


@_quietly
def complete_model(incomplete: str) -> Iterator[CompletionItem[Any]]:
    """Names of models on this machine, and files where a path is being written."""
    from click.shell_completion import CompletionItem

    from chatkv.model.inventory import names

    if incomplete[:1] in ("/", ".", "~"):
        yield CompletionItem(incomplete, type="file")
        return
    place = folders()
    found = [one for one in names(place.cache, place.models) if incomplete.lower() in one.lower()]
    yield from (CompletionItem(_one_line(one)) for one in found)
    if not found and incomplete:
        yield CompletionItem(incomplete, type="file")


@_quietly
def complete_known_model(incomplete: str) -> Iterator[CompletionItem[Any]]:
    """The same for commands that also know by its name what comes with the program."""
    from click.shell_completion import CompletionItem

    from chatkv.model.catalog import find_model

    embedded = find_model(None, folders().cache).name
    if incomplete.lower() in embedded.lower():
        yield CompletionItem(embedded)
    yield from complete_model(
        click.Context(click.Command("")), click.Argument(["model"]), incomplete
    )


def _one_line(text: str) -> str:
    """Shells are told line by line."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _is_fish() -> bool:
    return os.environ.get("_CHATKV_COMPLETE", "").startswith("fish")
