"""ULIDs: 26 lower-case characters, 48 bits of milliseconds and 80 random bits, sortable as text.

The alphabet is Crockford's base 32 (no i, l, o, u), as in the ULID specification,
https://github.com/ulid/spec, except that we write it in lower case.
"""

from __future__ import annotations

import os

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
LENGTH = 26
_RANDOM_BITS = 80
_TIME_LIMIT = 1 << 48
_VALUE_OF = {letter: value for value, letter in enumerate(ALPHABET)}


def encode(number: int) -> str:
    """A 128-bit number as 26 characters, the most significant first."""
    return "".join(ALPHABET[number >> shift & 31] for shift in range(125, -1, -5))


def decode(text: str) -> int:
    """The number behind 26 characters; ValueError where they are no ULID."""
    if len(text) != LENGTH or any(letter not in _VALUE_OF for letter in text):
        raise ValueError(f"not a ULID: {text!r}")
    number = 0
    for letter in text:
        number = number << 5 | _VALUE_OF[letter]
    return number


def ulid_after(last: str | None, now_s: float) -> str:
    """A new ULID for the time `now_s` (epoch seconds), always greater than `last`.

    Order must survive a clock that goes backwards and two processes within one millisecond, so
    the newest stored id is handed in and, where the clock would not pass it, counted up by one.
    """
    now_ms = min(max(int(now_s * 1000), 0), _TIME_LIMIT - 1)
    fresh = now_ms << _RANDOM_BITS | int.from_bytes(os.urandom(_RANDOM_BITS // 8), "big")
    if last is not None:
        fresh = max(fresh, decode(last) + 1)
    return encode(fresh)
