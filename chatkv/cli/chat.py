"""`chatkv chat` and `chatkv resume`: a conversation in full screen, or line by line."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from chatkv.cli import full_screen
from chatkv.cli.answer import (
    chat_options,
    chat_request,
    new_request,
    sampling_options,
    turn_options,
)
from chatkv.cli.options import setting_option, values_in_force
from chatkv.cli.stores import complete_session
from chatkv.client import ChatRequest, resolved
from chatkv.paths import folders

PLAIN = setting_option("plain")


@click.command()
@PLAIN
@chat_options
def chat(**arguments: Any) -> None:
    """Chat with a model.

    In full screen where the terminal can, F1 shows the keys; line by line with --plain, in pipes,
    with TERM=dumb or CHATKV_A11Y=1. There a line that ends with a backslash goes on in the next.
    Ctrl-C stops an answer and keeps what was said; at the prompt, or twice, it leaves.
    """
    _chat(arguments)


@click.command()
@click.argument("session", shell_complete=complete_session, metavar="SESSION")
@PLAIN
@chat_options
def resume(session: str, **arguments: Any) -> None:
    """Go on with a conversation.

    SESSION is an id, the start of one (4 characters or more) or an exact title.
    """
    _chat(arguments | {"resume": session, "resume_last": False, "system": None})


# What names a session, or begins one, has no place where the session is the argument.
resume.params = [
    param for param in resume.params if param.name not in ("resume", "resume_last", "system")
]


def _chat(arguments: dict[str, Any]) -> None:
    request = chat_request(arguments)
    if not arguments["plain"] and full_screen.is_possible():
        sampling_options(arguments)  # nonsense is refused before anything is shown
        left = full_screen.show(
            resolved(folders(), request),
            new_request(arguments),
            partial(turn_options, arguments),
            values_in_force(),
        )
        if not left.goes_on_plain:
            return
        request = ChatRequest(resume=left.session) if left.session else request
    from chatkv.cli import plain

    plain.converse(request, turn_options(arguments), request.system, new_request(arguments))
