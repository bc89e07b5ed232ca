"""A reply while it is being made: text for the reader, ids for the log, checkpoints for a crash."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from chatkv.engine.stops import StopStrings
from chatkv.model.detokenizer import TextStream

# A crash may cost the last second of what was read; half of that leaves room for a slow disk.
CHECKPOINT_S = 0.4


@dataclass
class Reply:
    """Text and ids so far. `text` is exactly what was passed to `on_text`."""

    stream: TextStream
    stops: StopStrings
    on_text: Callable[[str], None]
    text: str = ""
    ids: list[int] = field(default_factory=list)
    _ends: list[int] = field(default_factory=list)  # characters decoded after each id
    _draws: list[int] = field(default_factory=list)  # random numbers drawn after each id
    _decoded: int = 0

    def push(self, token: int, draws: int) -> None:
        """One more sampled id that belongs to the text; `draws` as the sampler counts them."""
        piece = self.stream.push(token)
        self._decoded += len(piece)
        self._draws.append(draws)  # before the id: whoever sees that finds this
        self.ids.append(token)
        self._ends.append(self._decoded)
        self._show(self.stops.push(piece))

    def push_silent(self, token: int, draws: int) -> None:
        """A sampled id without text of its own: the end of the turn."""
        self._draws.append(draws)
        self.ids.append(token)
        self._ends.append(self._decoded)

    def draws_after(self, num_ids: int) -> int:
        """How many random numbers the first num_ids ids took: sampling may be further already."""
        return self._draws[num_ids - 1]

    def go_on_from(self, ids: Sequence[int], draws: int) -> None:
        """Begin with what was said before, without showing it again."""
        show, self.on_text = self.on_text, lambda text: None
        for token in ids:
            self.push(token, draws)
        self.on_text = show

    def finish(self) -> None:
        """Show what was held back (half a character, a possible stop string), unless a stop
        string ended the reply: then drop the ids that only made the stop string."""
        if not self.stops.stopped:
            self._show(self.stops.push(self.stream.flush()) + self.stops.flush())
        if self.stops.stopped:
            needed = next((i for i, end in enumerate(self._ends) if end >= len(self.text)), 0)
            keep = needed + 1 if self.text else 0
            del self.ids[keep:], self._ends[keep:]

    def _show(self, text: str) -> None:
        if text:
            self.text += text
            self.on_text(text)


class Checkpointer:
    """Calls `save` every CHECKPOINT_S on a thread of its own, so that no token waits for a disk.

    `save` must take its own snapshot; an exception it raises is kept in `error` and ends the
    checkpoints, never the reply.
    """

    def __init__(self, save: Callable[[], None]) -> None:
        self._save = save
        self._done = threading.Event()
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)

    def __enter__(self) -> Checkpointer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(CHECKPOINT_S):
            try:
                self._save()
            except Exception as error:
                self.error = error
                return
