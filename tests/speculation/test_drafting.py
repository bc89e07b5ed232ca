"""What is looked up, and how much of it is drafted."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from chatkv.engine.draft_costs import DraftCosts
from chatkv.engine.drafts import Draft
from chatkv.engine.growth import Grown
from chatkv.engine.ngram import NgramDrafter
from chatkv.engine.speculation import PROBE_STEPS, Speculation


def lookup(ids: list[int], count: int = 4) -> list[int] | None:
    drafter = NgramDrafter()
    return None if drafter.outlook(ids) is None else list(drafter.propose(ids, count).tokens)


def test_what_followed_the_longest_equal_stretch_is_drafted() -> None:
    assert lookup([1, 2, 3]) is None
    assert lookup([1, 2, 3, 4, 9, 1, 2]) == [3, 4, 9, 1]
    # The latest place has the shorter stretch.
    assert lookup([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 2) == [3, 8]
    # Of two alike, the latest.
    assert lookup([1, 2, 3, 0, 1, 2, 4, 0, 1, 2], 1) == [4]
    # What repeats itself goes on to do so.
    assert lookup([5, 6, 5, 6], 5) == [5, 6, 5, 6, 5]


def longest_by_definition(ids: list[int]) -> int:
    """Length of the longest end of `ids` that is somewhere before, ends at different places."""
    for length in range(len(ids) - 1, 1, -1):
        end = ids[-length:]
        if any(ids[at : at + length] == end for at in range(len(ids) - length)):
            return length
    return 0


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 5))
def test_token_by_token_finds_what_is_found_at_once(ids: list[int], count: int) -> None:
    grown = NgramDrafter()
    for size in range(len(ids) + 1):
        kind = grown.outlook(ids[:size])
    assert (kind is None) == (longest_by_definition(ids) < 2)
    if kind is not None:
        assert list(grown.propose(ids, count).tokens) == lookup(ids, count)
        assert grown._longest(ids)[1] == min(longest_by_definition(ids), 24)


class Read(list[int]):
    """Ids that count how often one of them is looked at."""

    num_read = 0

    def __getitem__(self, at: Any) -> Any:
        self.num_read += 1
        return super().__getitem__(at)


def test_a_lookup_takes_no_longer_in_a_long_conversation() -> None:
    """What all the tokens of a long one have in common is looked at only so often."""

    def num_read(size: int) -> int:
        ids, drafter = Read(n % 1000 % 7 for n in range(size)), NgramDrafter()
        drafter.outlook(ids)
        most = 0
        for _ in range(20):
            ids.append(3)
            ids.num_read = 0
            drafter.outlook(ids)
            most = max(most, ids.num_read)
        return most

    assert 100 < num_read(64_000) <= 1.1 * num_read(1_000)


def speculation(costs: DraftCosts | None = None) -> Speculation:
    return Speculation(NgramDrafter(), costs or DraftCosts(is_fixed=True))


def play(spec: Speculation, ids: list[int], truth: list[int]) -> list[int]:
    """The lengths drafted while an answer that goes `truth` is made."""
    ids, lengths, at = list(ids), [], 0
    while at < len(truth):
        draft = spec.draft(ids, 16)
        lengths.append(len(draft))
        for index in range(len(draft) + 1):
            if at == len(truth):
                break
            token, at = truth[at], at + 1
            is_drafted = index < len(draft) and draft.tokens[index] == token
            spec.heard(token, is_drafted)
            ids.append(token)
            if not is_drafted:
                break
    return lengths


def test_drafts_that_are_right_grow_and_drafts_that_are_wrong_end() -> None:
    text = list(range(100, 300))
    right = speculation()
    lengths = play(right, [*text, 1, 100, 101], text[2:])
    assert max(lengths) == 16
    assert len(lengths) < 30
    assert right.counts.steps == len(lengths)
    # Each step says one token of its own, the last perhaps none.
    assert 0 <= right.counts.accepted - (len(text[2:]) - len(lengths)) <= 1
    # Pairs that come again, each time followed by something else.
    wrong = speculation()
    noise = [token for n in range(150) for token in (1, 2, 1000 + n)]
    lengths = play(wrong, noise[:30], noise[30:])
    assert wrong.counts.accepted < wrong.counts.drafted
    assert sum(lengths[-60:]) == 0 or wrong.counts.accepted > 0.5 * wrong.counts.drafted


def test_dear_steps_draft_less_and_costs_follow_what_is_measured() -> None:
    text = list(range(100, 200))

    def drafted(multiple: float) -> int:
        costs = DraftCosts()
        for _ in range(60):
            costs.observe(1, 0, 0.010)
            for count in (1, 4, 12):
                costs.observe(1, count, 0.010 * (1 + multiple * count))
        spec = speculation(costs)
        play(spec, [*text, 1, 100, 101], text[2:])
        return spec.counts.drafted

    assert drafted(0.01) > 80
    assert drafted(2.0) == 0


def test_costs_are_those_of_the_line_that_was_measured() -> None:
    costs = DraftCosts()
    for _ in range(100):
        costs.observe(2, 0, 0.020)
        for count in (1, 3, 9):
            costs.observe(2, count, 0.020 * (1.3 + 0.05 * count))
    assert costs.plain_s() == 0.020
    assert costs.step(0) == 1
    assert abs(costs.step(6) - 1.6) < 0.05
    fixed = DraftCosts(is_fixed=True)
    before = fixed.step(5)
    fixed.observe(1, 5, 100.0)
    assert fixed.step(5) == before


def test_a_plain_step_is_taken_now_and_then_to_know_what_it_takes() -> None:
    costs = DraftCosts()
    text = list(range(100, 160)) * 8
    spec = speculation(costs)
    assert play(spec, text, text[:4])[0] == 0  # nothing is known yet
    costs.observe(1, 0, 0.01)
    lengths = play(spec, text, (text * 4)[:1200])
    assert all(0 in lengths[at : at + PROBE_STEPS + 1] for at in range(len(lengths) - PROBE_STEPS))
    assert sum(length > 0 for length in lengths) > 0.9 * len(lengths)


RATES = (0.02, 0.3, 0.95)


def grown(costs: DraftCosts | None = None) -> Grown:
    return Grown(costs or DraftCosts(is_fixed=True), RATES.__getitem__, behind=0.5, share=0.06)


def test_a_draft_takes_what_is_worth_its_share_of_a_step() -> None:
    assert grown().take([0, 0, 0]) == 0
    assert grown().take([1, 1, 1, 0, 0]) == 3
    dear = DraftCosts()
    for _ in range(60):
        dear.observe(1, 0, 0.010)
        for count in (1, 4, 8):
            dear.observe(1, count, 0.010 * (1 + count))
    assert grown(dear).take([1, 1, 1]) == 0


def test_a_draft_goes_on_behind_what_is_sure() -> None:
    def length(kinds: list[int]) -> int:
        growth, taken = grown(), 0
        while taken < 20 and growth.take(kinds):
            taken += 1
            if not growth.goes_on():
                break
        return taken

    assert length([2]) > length([1]) > 0
    assert 2 < length([2]) < 20


def test_a_token_beside_the_branch_is_found_at_its_place_alone() -> None:
    draft = Draft([1, 2, 3, 4, 5, 6], [0, 2, 0])
    found = {(place, token): draft.index_of(token, place) for place in range(5) for token in (1, 4)}
    assert {key: at for key, at in found.items() if at is not None} == {(0, 1): 0, (0, 4): 3}
    assert draft.index_of(5, 2) == 4
    assert draft.index_of(6, 0) == 5
