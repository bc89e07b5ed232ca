"""Whether the threads of a product wait long or briefly for each other."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from chatkv import waiting
from chatkv.waiting import Patience
from engines import eventually


@pytest.fixture
def patience() -> Iterator[Patience]:
    made = Patience()
    yield made
    made.close()


def holders() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if "_hold_a_team" in one.name]


def test_others_make_it_brief_and_their_end_long_again(patience: Patience) -> None:
    patience.decide(0.25)
    assert not patience.is_brief and not holders()  # a quarter of a core is borne
    patience.decide(0.4)
    assert patience.is_brief and len(holders()) == 1
    patience.decide(0.9)
    assert len(holders()) == 1
    patience.decide(0.25)
    assert patience.is_brief  # no change to and fro
    patience.decide(0.1)
    assert not patience.is_brief
    eventually(lambda: not holders())


def test_a_closed_one_leaves_no_thread(patience: Patience) -> None:
    patience.decide(0.9)
    patience.close()
    patience.close()
    eventually(lambda: not holders())


@pytest.mark.parametrize(("waited_s", "is_brief"), [(0.02, False), (0.16, True)])
def test_it_looks_after_what_was_computed(
    patience: Patience, monkeypatch: pytest.MonkeyPatch, waited_s: float, is_brief: bool
) -> None:
    told = iter([1.0, 1.0 + waited_s])
    monkeypatch.setattr(waiting, "_waited_s", lambda: next(told))
    for _ in range(12):
        patience.observe(0.041)
    assert patience.is_brief == is_brief


def test_without_the_systems_word_nothing_changes(
    patience: Patience, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "_waited_s", lambda: None)
    for _ in range(20):
        patience.observe(0.1)
    assert not patience.is_brief


def test_the_system_counts_only_upwards() -> None:
    first = waiting._waited_s()
    if first is None:
        pytest.skip("this system has no /proc/thread-self/schedstat")
    second = waiting._waited_s()
    assert second is not None and second >= first >= 0
