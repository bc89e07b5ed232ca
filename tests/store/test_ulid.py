"""ULIDs: the specification's form, and an order that no clock can break."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkv_store.ulid import ALPHABET, LENGTH, decode, encode, ulid_after


@given(st.integers(min_value=0, max_value=(1 << 128) - 1))
def test_numbers_survive_the_round_trip(number: int) -> None:
    text = encode(number)
    assert len(text) == LENGTH and set(text) <= set(ALPHABET)
    assert decode(text) == number


@given(st.integers(0, (1 << 128) - 1), st.integers(0, (1 << 128) - 1))
def test_text_order_is_number_order(one: int, other: int) -> None:
    assert (encode(one) < encode(other)) == (one < other)


def test_time_lies_in_the_first_ten_characters() -> None:
    # The example of the specification: 1469922850259 ms is 01ARZ3NDEK.
    assert ulid_after(None, 1469922850.259)[:10] == "01arz3ndek"


@given(st.lists(st.floats(min_value=0, max_value=4e9), min_size=2, max_size=20))
def test_every_id_is_greater_than_the_last_whatever_the_clock_says(clock: list[float]) -> None:
    ids: list[str] = []
    for now_s in clock:
        ids.append(ulid_after(ids[-1] if ids else None, now_s))
    assert ids == sorted(set(ids))


@pytest.mark.parametrize("text", ["", "0" * 25, "0" * 27, "I" * 26, "u" * 26])
def test_what_is_no_ulid_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a ULID"):
        decode(text)
