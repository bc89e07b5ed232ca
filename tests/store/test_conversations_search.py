"""Search finds words in any script, takes every query literally, and never raises."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from chatkv_store.conversations import Conversations
from chatkv_store.search import snippet

SAID = {
    "coffee": ("Where is the best Café in Zürich?", "Try the one at the lake."),
    "tower": ("東京タワーの高さは?", "333メートルです。"),
    "code": ("How do I sort in C++?", "Use std::sort(v.begin(), v.end()); 100% sure"),
    "greek": ("Τι είναι η ΦΙΛΟΣΟΦΊΑ;", "Αγάπη για τη σοφία"),
    "russian": ("Где находится Эрмитаж?", "В Санкт-Петербурге"),
    "arabic": ("ما هي عاصمة مصر؟", "القاهرة"),
    "thai": ("สวัสดีครับ", "สวัสดี มีอะไรให้ช่วยไหม"),
    "party": ("🎉 party 🎂", "congratulations 👩‍👩‍👧"),
    "logic": ('NOT a AND "b" OR NEAR(c)', "col: user_text ^ - *"),
    "accents": ("nai\u0308ve re\u0301sume\u0301", "decomposed letters"),
    "street": ("Wo ist die Straße?", "Dort."),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Conversations]:
    with Conversations(tmp_path_factory.mktemp("search") / "c.sqlite3") as store:
        for title, (user, reply) in SAID.items():
            session = store.create_session(title=title)
            with store.lease(session.id):
                turn = store.begin_turn(session.id, user_text=user, prompt_ids=[])
                store.finish_turn(turn.id, reply_text=reply, reply_ids=[], rng_draws_after=0)
        yield store


def found(store: Conversations, query: str) -> list[str]:
    return sorted(hit.session.title for hit in store.search(query))


@pytest.mark.parametrize(
    ("query", "title"),
    [
        ("cafe", "coffee"),
        ("CAFÉ lake", "coffee"),
        ("zur", "coffee"),
        ("東京", "tower"),
        ("メートル", "tower"),
        ("C++", "code"),
        ("std::sort", "code"),
        ("100%", "code"),
        ("φιλοσοφία", "greek"),
        ("эрмитаж", "russian"),
        ("القاهرة", "arabic"),
        ("สวัสดี", "thai"),
        ("🎂", "party"),
        ('"b"', "logic"),
        ("NEAR(c)", "logic"),
        ("user_text", "logic"),
        ("resume naïve", "accents"),
        ("straße", "street"),
        ("ＣＡＦＥ", "coffee"),
        ("Rus", "russian"),  # a title
    ],
)
def test_words_of_any_script_are_found(store: Conversations, query: str, title: str) -> None:
    assert found(store, query) == [title]


@pytest.mark.parametrize("query", ["", " ", "\0", "nowhere", "cafe 東京", "_", "C++ std", "OR"])
def test_a_query_has_no_syntax(store: Conversations, query: str) -> None:
    """Every piece must be there; operators, wildcards and quotes are ordinary characters."""
    everywhere = {"_": ["logic"], "C++ std": ["code"], "OR": ["logic"]}
    assert found(store, query) == everywhere.get(query, [])


@given(st.text(alphabet=st.characters(), max_size=30))
@example('"')
@example("a* NEAR/2 b")
@example("user_text : x")
@example("{a b} : c")
@example("\ud800\udfff")
@example("^a + b - c")
@example("'); DROP TABLE turns; --")
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_no_query_raises(store: Conversations, query: str) -> None:
    for hit in store.search(query):
        assert hit.session.title in SAID


@given(st.sampled_from(sorted(SAID)), st.data())
@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
def test_every_word_that_was_said_is_found(
    store: Conversations, title: str, data: st.DataObject
) -> None:
    word = data.draw(st.sampled_from(" ".join(SAID[title]).split()))
    assert title in found(store, word)


def test_hits_are_grouped_by_session_newest_first(tmp_path: Path) -> None:
    with Conversations(tmp_path / "c.sqlite3") as store:
        old, new = store.create_session(title="old"), store.create_session(title="tea time")
        for session, count in ((new, 1), (old, 3)):
            for number in range(count):
                with store.lease(session.id):
                    turn = store.begin_turn(session.id, user_text=f"tea {number}", prompt_ids=[])
                    store.finish_turn(turn.id, reply_text="milk?", reply_ids=[], rng_draws_after=0)
        hits = store.search("tea")
        assert [(hit.session.id, hit.turn_index, hit.num_hits) for hit in hits] == [
            (old.id, 3, 3),
            (new.id, 1, 2),
        ]
        assert [hit.snippet for hit in hits] == ["tea 2", "tea 0"]
        assert [session.id for session in store.list_sessions(limit=1, search="tea")] == [old.id]
        (title_only,) = store.search("time")
        assert (title_only.turn_index, title_only.snippet) == (None, "tea time")


def test_a_streaming_reply_is_searchable_and_the_index_follows_it(tmp_path: Path) -> None:
    with Conversations(tmp_path / "c.sqlite3") as store:
        session = store.create_session(title="t")
        with store.lease(session.id):
            turn = store.begin_turn(session.id, user_text="hi", prompt_ids=[])
            store.checkpoint_turn(turn.id, reply_text="alpha", reply_ids=[], rng_draws_after=0)
            assert len(store.search("alpha")) == 1
            store.finish_turn(turn.id, reply_text="beta", reply_ids=[], rng_draws_after=0)
        assert store.search("alpha") == [] and len(store.search("beta")) == 1


def test_snippets_are_one_line_around_the_match() -> None:
    text = "x " * 200 + "the\nÑandú runs" + " y" * 200
    cut = snippet(text, ["nandu"])
    assert "the Ñandú runs" in cut and "\n" not in cut
    assert cut.startswith("…") and cut.endswith("…") and len(cut) <= 82
    assert snippet("short", ["absent"]) == "short"
