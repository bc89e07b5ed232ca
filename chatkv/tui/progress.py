"""How far a restore, a prefill or a start has come, as a bar that a reader without colours can
read too: `▓` came from what is kept, `█` was computed, `░` is still to be done."""

from __future__ import annotations

from dataclasses import dataclass, replace

from chatkv.words import count

SAVED, DONE, LEFT = "▓", "█", "░"
NAMES = {"restore": "loading", "prefill": "reading"}  # an engine's stage -> what a user sees


@dataclass(frozen=True)
class Progress:
    """`done` of `total` in one stage. `saved`: what of `done` the cache held already."""

    stage: str
    done: int
    total: int
    saved: int = 0

    def follow(self, stage: str, done: int, total: int) -> Progress:
        """The next news. Prefill first tells how many tokens have their KV before it begins."""
        if stage == "prefill":
            saved = self.saved if self.stage == "prefill" and self.total == total else done
            return Progress(stage, done, total, saved)
        return replace(self, stage=stage, done=done, total=total, saved=0)

    @property
    def is_over(self) -> bool:
        return self.done >= self.total

    @property
    def share(self) -> float:
        return min(1.0, self.done / self.total) if self.total > 0 else 0.0

    def line(self, width: int) -> str:
        """The stage, the bar and the numbers in at most `width` cells."""
        name = NAMES.get(self.stage, self.stage)
        percent = f"{100 * self.share:3.0f}%"
        choices = [percent]
        if self.stage == "prefill":
            tokens = f"{percent} · {count(self.done)}/{count(self.total)} tokens"
            choices = [f"{tokens}, {count(self.saved)} kept" if self.saved else tokens, *choices]
        for numbers in choices:
            room = width - len(name) - len(numbers) - 2
            if room >= 8:
                break
        if room < 4:
            return f"{name} {percent.strip()}"[:width]
        return f"{name} {bar(self.done, self.saved, self.total, min(room, 40))} {numbers}"


NONE = Progress("", 0, 0)


def bar(done: int, saved: int, total: int, width: int) -> str:
    """`width` cells; whatever is not nothing shows, and only what is whole fills the bar."""
    if total <= 0:
        return LEFT * width
    filled = _cells(done, total, width)
    kept = min(_cells(saved, total, width), filled)
    return SAVED * kept + DONE * (filled - kept) + LEFT * (width - filled)


def _cells(part: int, whole: int, width: int) -> int:
    if part >= whole:
        return width
    return 0 if part <= 0 else max(1, min(width - 1, round(width * part / whole)))
