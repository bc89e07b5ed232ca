"""The settings, the engine's process and the terminal."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator

from chatkv import __version__
from chatkv.cli.checks.finding import Finding, note, ok, problem
from chatkv.cli.output import wants_colour
from chatkv.errors import ChatkvError, UsageError
from chatkv.paths import Folders
from chatkv.words import plural, size

# Read where they are needed, and no settings.
OTHER_VARIABLES = {"CHATKV_HOME", "CHATKV_TOKEN", "CHATKV_CALIBRATE"}


def settings(place: Folders) -> Iterator[Finding]:
    """Reads them, and puts what others read from variables there."""
    from chatkv.cli.look import keymap, theme
    from chatkv.settings.read import carry, read
    from chatkv.settings.table import SETTINGS

    try:
        values = read(place.settings, os.environ)
        theme(values), keymap(values)
    except UsageError as error:
        yield problem("settings", str(error), "correct it; until then only a few commands work")
        return
    carry(values, os.environ)
    changed = sum(value.source != "default" for value in values.values())
    if place.settings.exists():
        yield ok("settings", f"{plural(changed, 'setting')} changed; {place.settings}")
    else:
        yield ok("settings", f"{plural(changed, 'setting')} changed; there is no file")
    known = {setting.variable for setting in SETTINGS.values()} | OTHER_VARIABLES
    for name in sorted(os.environ):
        if name.startswith("CHATKV_") and not name.startswith("CHATKV_TEST_") and name not in known:
            yield note("settings", f"{name} is set, and means nothing")


def engine(place: Folders) -> Iterator[Finding]:
    from chatkv.client import engine as client

    process = client.process(place)
    try:
        running = client.find(place)
    except (ChatkvError, OSError, ValueError) as error:
        running = None
        yield note("engine", str(error))
    if running is not None and running.is_ours:
        text = f"process {process}, {size(running.status.get('memory_bytes', 0))} of memory"
        yield ok("engine", text)
    elif running is not None:
        text = f"of version {running.status.get('version')}, and this is {__version__}"
        yield note("engine", text, "the next chat replaces it when it is idle, or `chatkv stop`")
    elif process is not None:
        text = f"process {process} holds it and does not answer"
        yield problem("engine", text, f"wait, or `chatkv stop`; at worst kill {process}")
    elif place.socket.exists():
        yield ok("engine", "none runs; the last one was killed, and the next cleans up")
    else:
        yield ok("engine", "none runs; the next chat starts one")


def terminal() -> Iterator[Finding]:
    encoding = (getattr(sys.stdout, "encoding", "") or "").lower().replace("-", "")
    if encoding in ("utf8", "utf16", "utf32"):
        yield ok("locale", f"{sys.stdout.encoding}")
    else:
        text = f"{sys.stdout.encoding or 'unknown'}: other characters show as ?"
        yield problem("locale", text, "export LANG=C.UTF-8, or another UTF-8 locale")
    kind = os.environ.get("TERM", "")
    if not sys.stdout.isatty():
        yield ok("terminal", "stdout is none: answers come line by line")
        return
    columns, lines = shutil.get_terminal_size()
    text = f"{kind or 'unknown'}, {columns} x {lines}, "
    text += "in colour" if wants_colour(sys.stdout) else "without colour"
    if kind in ("", "dumb", "unknown"):
        yield note("terminal", text, "chats are line by line; TERM=xterm-256color for full screen")
    elif columns < 40 or lines < 12:
        yield note("terminal", text, "the full-screen chat wants 40 x 12 at least")
    else:
        yield ok("terminal", text)
