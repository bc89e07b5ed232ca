"""What values a setting may have: read from TOML's own types, or from the text of a variable.

Every kind's `parse` takes both, raises ValueError for what it does not allow, and `allowed` says
that in words ("temperature must be a number from 0 to 100").
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from chatkv.words import size

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_YES, _NO = ("yes", "true", "on", "1"), ("no", "false", "off", "0")


class Kind:
    """`allowed`: what a value must be, in words."""

    allowed = ""

    def __init__(self, allowed: str = "") -> None:
        self.allowed = allowed or self.allowed

    def parse(self, given: object) -> Any:
        """The value that a file's TOML or a variable's text stands for. Raises ValueError."""
        raise NotImplementedError

    def written(self, value: Any) -> str:
        """The value as a variable holds it; `parse` takes it back."""
        return str(value)


class Text(Kind):
    allowed = "a text"

    def parse(self, given: object) -> str:
        if not isinstance(given, str) or not given.strip() or "\0" in given:
            raise ValueError
        return given


class Choice(Kind):
    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__(f"one of {', '.join(names)}")
        self.names = names

    def parse(self, given: object) -> str:
        if given not in self.names:
            raise ValueError
        return str(given)


class Number(Kind):
    """From `least` (itself excluded by `is_above`) to `most`; None: no such limit."""

    def __init__(
        self,
        least: float,
        most: float | None = None,
        *,
        is_above: bool = False,
        is_whole: bool = False,
    ) -> None:
        kind = "a whole number" if is_whole else "a number"
        if most is None:
            super().__init__(f"{kind}, {least} or more")
        elif is_above:
            super().__init__(f"{kind} above {least} and at most {most}")
        else:
            super().__init__(f"{kind} from {least} to {most}")
        self.least, self.most = least, most
        self.is_above, self.is_whole = is_above, is_whole

    def parse(self, given: object) -> float:
        if isinstance(given, bool) or not isinstance(given, (int, float, str)):
            raise ValueError
        if self.is_whole and isinstance(given, float):
            raise ValueError
        number: float = int(given) if self.is_whole else float(given)
        is_low = number <= self.least if self.is_above else number < self.least
        # Said so that NaN is refused too.
        if is_low or not number <= (float("inf") if self.most is None else self.most):
            raise ValueError
        return number


class Flag(Kind):
    allowed = "true or false"

    def parse(self, given: object) -> bool:
        text = str(given).lower() if isinstance(given, (bool, str)) else ""
        if text not in (*_YES, *_NO):
            raise ValueError
        return text in _YES

    def written(self, value: bool) -> str:
        return "1" if value else "0"


class Switch(Flag):
    """A flag whose variable says "on" or "off"."""

    def written(self, value: bool) -> str:
        return "on" if value else "off"


class Size(Kind):
    """Bytes."""

    allowed = 'a size such as "20GiB"'

    def parse(self, given: object) -> int:
        from chatkv_store.budget import parse_size

        if isinstance(given, bool) or not isinstance(given, (int, str)):
            raise ValueError
        return parse_size(str(given))


class Duration(Kind):
    """Seconds."""

    allowed = 'seconds, or a time such as "15m" (s, m, h or d)'

    def parse(self, given: object) -> float:
        if isinstance(given, bool) or not isinstance(given, (int, float, str)):
            raise ValueError
        found = _DURATION.fullmatch(str(given).strip())
        if found is None:
            raise ValueError
        return float(found[1]) * _SECONDS[found[2]]

    def written(self, value: float) -> str:
        return f"{value:g}"


class Names(Kind):
    """Several texts: an array in the file, separated by commas in a variable."""

    allowed = "a list of texts"

    def parse(self, given: object) -> tuple[str, ...]:
        names = given.split(",") if isinstance(given, str) else given
        if not isinstance(names, (list, tuple)) or not all(isinstance(one, str) for one in names):
            raise ValueError
        return tuple(one.strip() for one in names if one.strip())

    def written(self, value: tuple[str, ...]) -> str:
        return ",".join(value)


class Table(Kind):
    """Names and texts: a table in the file; no variable holds it."""

    allowed = "a table of names and texts"

    def parse(self, given: object) -> dict[str, str]:
        if not isinstance(given, Mapping):
            raise ValueError
        if not all(isinstance(one, str) and one.strip() for one in given.values()):
            raise ValueError
        return dict(given)

    def written(self, value: Mapping[str, str]) -> str:
        return "; ".join(f"{name} = {keys}" for name, keys in value.items())


def shown(kind: Kind, value: Any) -> str:
    """A value for people: "20.0 GiB", "15 min", "yes"."""
    if isinstance(kind, Size):
        return size(value)
    if isinstance(kind, Flag):
        return "yes" if value else "no"
    if isinstance(kind, Duration):
        for unit_s, name in ((3600, "h"), (60, "min")):
            if value >= unit_s and value % unit_s == 0:
                return f"{value / unit_s:g} {name}"
        return f"{value:g} s"
    return kind.written(value)
