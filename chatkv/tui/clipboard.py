"""Copying out of a terminal, which may be on another machine, inside tmux, or none that copies."""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

# Programs that own a desktop's clipboard, and the variable without which they cannot.
_PROGRAMS = (
    (("wl-copy",), "WAYLAND_DISPLAY"),
    (("xclip", "-selection", "clipboard"), "DISPLAY"),
    (("pbcopy",), None),
)
# Many terminals drop a longer sequence without a word (xterm's default is near this).
MAX_OSC52_BYTES = 74_000
_FENCE = re.compile(r"^(`{3,}|~{3,})[^\n]*\n(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)


def osc52(text: str, in_tmux: bool) -> str:
    """The sequence that makes a terminal copy `text`; tmux passes it on when it is wrapped."""
    data = base64.b64encode(text.encode("utf-8", "replace")).decode()
    sequence = f"\x1b]52;c;{data}\a"
    if not in_tmux:
        return sequence
    return "\x1bPtmux;" + sequence.replace("\x1b", "\x1b\x1b") + "\x1b\\"


def copy(
    text: str,
    write: Callable[[str], object],
    file: Path,
    environment: Mapping[str, str] = os.environ,
) -> str:
    """Copy by every way there is, and say in a few words where the text is now.

    `write` reaches the terminal. A terminal does not tell whether it has copied, so where no
    desktop took the text either it is written to `file` too.
    """
    fits = len(text) <= MAX_OSC52_BYTES
    if fits:
        write(osc52(text, "TMUX" in environment))
    for program, variable in _PROGRAMS:
        if (variable is None or variable in environment) and _run(program, text):
            return "copied"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        return f"sent to the terminal's clipboard only: {error}" if fits else f"not copied: {error}"
    return f"sent to the terminal's clipboard, and in {file}" if fits else f"too long: in {file}"


def code_blocks(markdown: str) -> list[str]:
    """The contents of fenced blocks, one that is still open left out."""
    return [found[2] for found in _FENCE.finditer(markdown)]


def _run(program: tuple[str, ...], text: str) -> bool:
    if shutil.which(program[0]) is None:
        return False
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            program,
            input=text.encode("utf-8", "replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=2,
            check=True,
        )
        return True
    return False
