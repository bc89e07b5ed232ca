"""Where both ends meet: the arithmetic against doing it step by step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkv.restore.estimates import WORTH_MORE, Estimates
from chatkv.restore.meeting import Pull, layered_s

SECONDS = st.floats(0.001, 10)
PULLS = st.builds(
    Pull,
    gap=st.integers(0, 20),
    load_s=SECONDS,
    compute_s=SECONDS,
    fixed_s=st.floats(0, 1),
    rest_s=st.floats(0, 5),
    left_s=st.floats(0, 5),
    num_groups=st.integers(1, 30),
)


@given(SECONDS, st.floats(0, 10), st.floats(0, 5), st.integers(1, 30))
def test_a_step_waits_for_each_part_and_no_longer(
    computing_s: float, load_s: float, left_s: float, num_groups: int
) -> None:
    now, begins_s, takes_s = 0.0, left_s, load_s
    if not load_s:
        begins_s, takes_s = 0.0, left_s
    for group in range(num_groups):
        there_s = begins_s + takes_s * (group + 1) / num_groups
        now = max(now, there_s) + computing_s / num_groups
    assert layered_s(computing_s, load_s, left_s, num_groups) == pytest.approx(now)


@given(PULLS, st.integers(0, 20))
def test_shares_are_the_best(pull: Pull, most: int) -> None:
    most = min(most, pull.gap)
    together = pull.share_together(0, most)
    assert pull.together_s(together) == min(map(pull.together_s, range(most + 1)))
    apart = pull.share_apart(most)
    assert 0 <= apart <= most
    # Nothing, and so no step at all, is a case of its own.
    best = min((pull.apart_s(taken) for taken in range(1, most + 1)), default=pull.apart_s(0))
    assert pull.apart_s(apart) <= max(best, pull.apart_s(0)) + 1e-9


def test_one_step_for_what_is_short_two_for_what_is_long() -> None:
    """A step less saves what a step costs; a longer wait for first layers is what it takes."""
    short = Pull(gap=8, load_s=0.034, compute_s=0.14, fixed_s=0.07, rest_s=0.03, num_groups=10)
    taken = short.share_together(0, 7)
    assert taken == 1
    assert short.together_s(taken) < short.apart_s(short.share_apart(8))
    long = Pull(gap=16, load_s=0.07, compute_s=0.14, fixed_s=0.07, rest_s=0.03, num_groups=10)
    assert long.together_s(long.share_together(0, 7)) > long.apart_s(long.share_apart(8))


def test_what_is_slower_than_both_ends_together_is_given_up() -> None:
    estimates = Estimates(1.0, lambda ranges: sum((b - a) / 64 for a, b in ranges), num_groups=4)
    # Of eight blocks, each end brings four in the time that one takes for them.
    assert not estimates.is_too_slow(num_wanted=4, missing=(0, 512), total=512)
    assert not estimates.is_too_slow(int(4 * WORTH_MORE), missing=(0, 512), total=512)
    assert estimates.is_too_slow(int(4 * WORTH_MORE) + 1, missing=(0, 512), total=512)
