"""Stop strings across every way of cutting a text into pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chatkv.engine.stops import StopStrings

PIECES = st.lists(st.text(alphabet="ab\n", max_size=4), max_size=12)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3)


@given(PIECES, STOPS)
def test_shows_everything_before_the_first_stop_and_nothing_after(
    pieces: list[str], stops: list[str]
) -> None:
    watcher = StopStrings(stops)
    shown = ""
    for piece in pieces:
        shown += watcher.push(piece)
        if watcher.stopped:
            break
        # Nothing that could still become part of a stop string has been shown.
        assert not any(stop in shown for stop in stops)
    if not watcher.stopped:
        shown += watcher.flush()
    text = "".join(pieces)
    # The earliest stop string that is complete first ends the text.
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert watcher.stopped == bool(ends)
    if not ends:
        assert shown == text
    else:
        assert text.startswith(shown)
        assert not any(stop in shown for stop in stops)
        assert any(text.startswith(shown + stop) for stop in stops)


def test_holds_back_only_what_may_become_a_stop() -> None:
    watcher = StopStrings(["\nUser:"])
    assert watcher.push("Hello\nUs") == "Hello"
    assert watcher.push("ual") == "\nUsual"
    assert watcher.push("\nUser") == ""
    assert watcher.push(": no") == ""
    assert watcher.stopped
    assert watcher.push("more") == ""
