"""Numbers, times and other people's text as people read them, in every face alike."""

from __future__ import annotations

import re
import time

# A title could otherwise move the cursor or recolour the terminal of whoever lists it.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """`text` without control characters, line breaks and tabs excepted."""
    return _CONTROL.sub("�", text)


def size(num_bytes: int) -> str:
    """Bytes with three digits and a unit of 1024: "0 B", "1.50 KiB", "12.3 MiB", "512 GiB"."""
    amount, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 999.5:
            break
        amount, unit = amount / 1024, larger
    if unit == "B":
        return f"{num_bytes} B"
    digits = 2 if amount < 9.995 else 1 if amount < 99.95 else 0
    return f"{amount:.{digits}f} {unit}"


def count(number: int) -> str:
    """A number with its thousands set apart: "12,345"."""
    return f"{number:,}"


def plural(number: int, one: str, many: str = "") -> str:
    """ "1 turn", "2 turns"; `many` where an s does not do."""
    return f"{count(number)} {one if number == 1 else many or one + 's'}"


def ago(then_s: float, now_s: float | None = None) -> str:
    """How long ago an epoch time was, for people; a date where it lies ahead."""
    seconds = (time.time() if now_s is None else now_s) - then_s
    if seconds < -60:
        return time.strftime("%Y-%m-%d", time.localtime(then_s))
    if seconds < 60:
        return "just now"
    for limit_s, unit_s, name in (
        (3600, 60, "min"),
        (86_400, 3600, "h"),
        (86_400 * 60, 86_400, "d"),
        (86_400 * 730, 86_400 * 30.44, "mo"),
    ):
        if seconds < limit_s:
            return f"{int(seconds // unit_s)} {name} ago"
    return f"{int(seconds // (86_400 * 365.25))} y ago"
