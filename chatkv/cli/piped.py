"""Standard input that is read while it arrives: what is there can be prefilled before its end."""

from __future__ import annotations

import codecs
import io
import os
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

# Who writes for longer than this is worth being listened to; most pipes are over before.
PATIENCE_S = 0.3
# More text than a few words, so that not every word becomes a request.
_POLL_S = 0.2


class Piped:
    """The text of a pipe; read by a thread, so that a pipe which hangs does not hold up Ctrl-C."""

    def __init__(self, file: int, encoding: str = "utf-8") -> None:
        self._file = file
        decoder = codecs.getincrementaldecoder(encoding)("replace")
        self._decoder = io.IncrementalNewlineDecoder(decoder, translate=True)
        self._text: list[str] = []
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._read, name="stdin", daemon=True)
        self._thread.start()

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Whether all was read, waiting for that a while."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def text(self) -> str:
        """What was read so far. Raises what reading has raised."""
        if self._error is not None:
            raise self._error
        return "".join(self._text)

    def growing(self) -> Iterator[str]:
        """The text, each time that there is more of it, until its end."""
        seen = -1
        while not self.has_ended(_POLL_S):
            if len(self._text) != seen:
                seen = len(self._text)
                yield self.text

    def _read(self) -> None:
        try:
            while data := os.read(self._file, 1 << 16):
                self._text.append(self._decoder.decode(data))
            self._text.append(self._decoder.decode(b"", final=True))
        except OSError as error:
            self._error = error


def standard_input() -> Piped | None:
    """Standard input where it is a pipe; None where it is something that cannot be waited for."""
    with suppress(OSError, AttributeError, ValueError):
        file = sys.stdin.fileno()
        kind = os.fstat(file).st_mode
        if stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind):
            return Piped(file, sys.stdin.encoding)
    return None
