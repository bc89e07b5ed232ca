"""Sessions and turns: what is saved comes back, forks share, deletion spares what others reach."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatkv_store.conversations import Conversations, Session, Turn
from chatkv_store.errors import (
    SessionAmbiguous,
    SessionNotFound,
    StoreBusy,
    StoreError,
)


class Clock:
    """Epoch seconds that only a test moves."""

    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Conversations]:
    with Conversations(tmp_path / "data" / "c.sqlite3", clock=clock) as store:
        yield store


def say(store: Conversations, session: Session, user: str, reply: str = "ok") -> Turn:
    """One whole turn of 2 prompt tokens and 3 reply tokens."""
    with store.lease(session.id):
        turn = store.begin_turn(session.id, user_text=user, prompt_ids=[7, 8])
        return store.finish_turn(turn.id, reply_text=reply, reply_ids=[1, 2, 3], rng_draws_after=3)


def texts(store: Conversations, session: Session) -> list[str]:
    return [turn.user_text for turn in store.chain(session.id)]


# --- a turn's life ------------------------------------------------------------------------------


def test_every_field_of_a_turn_comes_back_from_a_closed_file(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "c.sqlite3"
    prompt = [0, 1, 255, 256, 65536, 2**32 - 1]
    with Conversations(path, clock=clock) as store:
        session = store.create_session(model="M", namespace="ab" * 32, settings={"top_p": 0.9})
        with store.lease(session.id):
            begun = store.begin_turn(
                session.id,
                user_text="wörds \0 🎉",
                system_text="be kind",
                prompt_ids=prompt,
                seed=2**64 - 1,
                rng_draws_before=5,
                stats={"plan": "none"},
            )
            clock.now_s += 1
            done = store.finish_turn(
                begun.id,
                reply_text="réponse",
                reply_ids=[3, 2],
                rng_draws_after=7,
                finish_reason="length",
                stats={"ttft_ms": 1.5},
            )
    with Conversations(path) as store:
        (turn,) = store.chain(session.id)
        again = store.get_session(session.id)
    assert turn == done
    assert (turn.user_text, turn.system_text, turn.reply_text) == (
        "wörds \0 🎉",
        "be kind",
        "réponse",
    )
    assert list(turn.prompt_ids) == prompt and list(turn.reply_ids) == [3, 2]
    assert (turn.seed, turn.rng_draws_before, turn.rng_draws_after) == (2**64 - 1, 5, 7)
    assert (turn.state, turn.finish_reason, turn.stats) == ("done", "length", {"ttft_ms": 1.5})
    assert (turn.index, turn.parent_id, turn.tokens_before, turn.num_tokens) == (1, None, 0, 8)
    assert (again.model, again.namespace, again.settings) == ("M", "ab" * 32, {"top_p": 0.9})
    assert (again.num_turns, again.num_tokens, again.head) == (1, 8, turn.id)
    assert again.updated_at == again.created_at + 1


def test_the_users_words_are_saved_before_anything_is_computed(store: Conversations) -> None:
    session = store.create_session()
    with store.lease(session.id):
        begun = store.begin_turn(session.id, user_text="hello", prompt_ids=[1, 2], seed=4)
        (seen,) = store.chain(session.id)
        assert seen == begun
        assert (seen.state, seen.user_text, list(seen.prompt_ids)) == ("pending", "hello", [1, 2])
        store.checkpoint_turn(begun.id, reply_text="ha", reply_ids=[9], rng_draws_after=1)
        (seen,) = store.chain(session.id)
        assert (seen.state, seen.reply_text, list(seen.reply_ids)) == ("streaming", "ha", [9])
        assert seen.rng_draws_after == 1


def test_token_counts_run_through_the_chain(store: Conversations) -> None:
    session = store.create_session()
    for number in range(4):
        say(store, session, f"turn {number}")
    assert [turn.tokens_before for turn in store.chain(session.id)] == [0, 5, 10, 15]
    assert [turn.index for turn in store.chain(session.id)] == [1, 2, 3, 4]
    assert store.get_session(session.id).num_tokens == 20


def test_a_finished_turn_cannot_be_written_again(store: Conversations) -> None:
    turn = say(store, store.create_session(), "hi")
    with pytest.raises(StoreError, match="is not being written"):
        store.checkpoint_turn(turn.id, reply_text="x", reply_ids=[], rng_draws_after=0)
    assert store.get_turn(turn.id) == turn


def test_no_turn_begins_behind_an_unfinished_one_or_without_a_lease(store: Conversations) -> None:
    session = store.create_session()
    with pytest.raises(StoreError, match="lease"):
        store.begin_turn(session.id, user_text="x", prompt_ids=[])
    with store.lease(session.id):
        store.begin_turn(session.id, user_text="x", prompt_ids=[])
        with pytest.raises(StoreError, match=r"turn 1 .* is not finished"):
            store.begin_turn(session.id, user_text="y", prompt_ids=[])
    assert texts(store, session) == ["x"]


def test_a_failed_turn_leaves_nothing_behind(store: Conversations) -> None:
    session = store.create_session()
    with store.lease(session.id), pytest.raises(OverflowError):
        store.begin_turn(session.id, user_text="x", prompt_ids=[2**32])
    assert store.get_session(session.id) == session and store.chain(session.id) == []


# --- sessions -----------------------------------------------------------------------------------


def test_a_session_takes_its_title_from_its_first_words(store: Conversations) -> None:
    session = store.create_session()
    say(store, session, "  What is the capital\nof France, " + "and of every other country? " * 3)
    say(store, session, "second")
    title = store.get_session(session.id).title
    assert title.startswith("What is the capital of France") and title.endswith("…")
    assert len(title) <= 60


def test_rename_and_update_change_only_what_is_given(store: Conversations) -> None:
    session = store.create_session(title="old", model="M", settings={"a": 1})
    store.rename(session.id, "new\n 日本 🎌")
    store.update_session(session.id, pinned=True, settings={"b": 2})
    changed = store.get_session(session.id)
    assert (changed.title, changed.model, changed.pinned) == ("new 日本 🎌", "M", True)
    assert changed.settings == {"b": 2}
    with pytest.raises(SessionNotFound):
        store.rename("0" * 26, "x")


@pytest.mark.parametrize("title", ["\ud800 broken", "a'; DROP TABLE turns; --", "%_\\", "\0", "ﷺ"])
def test_titles_of_any_text_are_kept_and_found(store: Conversations, title: str) -> None:
    session = store.create_session(title=title)
    assert store.get_session(title).id == session.id
    assert store.get_session(session.title).id == session.id


def test_order_of_use_survives_a_clock_that_goes_backwards(
    store: Conversations, clock: Clock
) -> None:
    made = []
    for number in range(5):
        made.append(store.create_session(title=str(number)))
        clock.now_s -= 3600
    assert [session.title for session in store.list_sessions()] == ["4", "3", "2", "1", "0"]
    assert [session.id for session in made] == sorted(session.id for session in made)
    say(store, made[1], "hello again")
    last = store.last_session()
    assert last is not None and last.title == "1"
    turns = [say(store, made[1], "t") for _ in range(3)]
    assert [turn.id for turn in turns] == sorted(turn.id for turn in turns)


def test_last_session_of_an_empty_file_is_none(store: Conversations) -> None:
    assert store.last_session() is None
    with pytest.raises(SessionNotFound, match="no conversation has been saved yet"):
        store.get_session("anything")


def test_a_session_answers_to_id_prefix_and_title(store: Conversations, clock: Clock) -> None:
    first = store.create_session(title="Trip to Rome")
    clock.now_s += 86_400 * 400
    second = store.create_session(title="Recipes")
    for session in (first, second):
        for ref in (session.id, session.id.upper(), session.id[:6], f" {session.title} "):
            assert store.get_session(ref) == session
    with pytest.raises(SessionNotFound, match="at least 4 characters"):
        store.get_session(first.id[:3])
    with pytest.raises(SessionNotFound, match=f'{second.id[:8]} "Recipes"'):
        store.get_session("recipes of old")


def test_several_candidates_are_named(store: Conversations) -> None:
    sessions = [store.create_session(title="same") for _ in range(5)]
    for ref in ("same", sessions[0].id[:8]):
        with pytest.raises(SessionAmbiguous) as caught:
            store.get_session(ref)
        line = str(caught.value)
        assert (
            "5 sessions" in line
            and store.short_ids()[sessions[4].id] in line
            and "and 2 more" in line
        )
        assert "\n" not in line


def test_an_exact_title_wins_over_a_prefix_of_an_id(store: Conversations) -> None:
    other = store.create_session(title="other")
    named = store.create_session(title=other.id[:8])
    assert store.get_session(other.id[:8]) == named


# --- branches -----------------------------------------------------------------------------------


def test_a_fork_shares_its_turns_and_goes_its_own_way(store: Conversations) -> None:
    session = store.create_session(title="main", settings={"top_k": 5}, model="M")
    for text in "abc":
        say(store, session, text)
    fork = store.fork(session.id, at_turn=2)
    assert (fork.title, fork.num_turns, fork.num_tokens) == ("main (fork)", 2, 10)
    assert (fork.model, fork.settings) == ("M", {"top_k": 5})
    say(store, fork, "d")
    assert texts(store, session) == ["a", "b", "c"]
    assert texts(store, fork) == ["a", "b", "d"]
    shared = {turn.id for turn in store.chain(session.id)} & {
        turn.id for turn in store.chain(fork.id)
    }
    assert len(shared) == 2, "a fork must not copy turns"


def test_where_a_fork_may_begin(store: Conversations) -> None:
    session = store.create_session()
    say(store, session, "a")
    with store.lease(session.id):
        store.begin_turn(session.id, user_text="b", prompt_ids=[1])
        assert texts(store, store.fork(session.id)) == ["a"], "an unfinished turn is left out"
        with pytest.raises(StoreBusy, match="still being written"):
            store.fork(session.id, at_turn=2)
    assert texts(store, store.fork(session.id, at_turn=0)) == []
    for at_turn in (-1, 3):
        with pytest.raises(StoreError, match=f"2 turns; there is no turn {at_turn}"):
            store.fork(session.id, at_turn=at_turn)


def test_deleting_drops_only_what_no_other_session_reaches(store: Conversations) -> None:
    session = store.create_session()
    for text in "abcd":
        say(store, session, text)
    fork = store.fork(session.id, at_turn=2)
    say(store, fork, "e")
    fork_of_fork = store.fork(fork.id, at_turn=2)
    assert store.delete_session(session.id) == 2
    assert texts(store, fork) == ["a", "b", "e"]
    assert store.delete_session(fork.id) == 1
    assert texts(store, fork_of_fork) == ["a", "b"]
    assert store.delete_session(fork_of_fork.id) == 2
    with pytest.raises(SessionNotFound):
        store.chain(fork.id)


def test_what_an_undo_leaves_behind_stays_until_the_session_goes(store: Conversations) -> None:
    session = store.create_session()
    first = say(store, session, "a")
    undone = say(store, session, "b")
    with store.lease(session.id):
        store.move_head(session.id, first.id)
    say(store, session, "c")
    assert texts(store, session) == ["a", "c"]
    assert store.get_turn(undone.id).user_text == "b"
    assert store.delete_session(session.id) == 3


def test_deleted_words_are_gone_from_the_file(store: Conversations) -> None:
    keep, gone = store.create_session(), store.create_session()
    say(store, keep, "ordinary words")
    say(store, gone, "xyzzyplugh", reply="frobozzle")
    store.delete_session(gone.id)
    for file in store.path.parent.glob(store.path.name + "*"):
        if file.is_file():
            content = file.read_bytes()
            assert b"xyzzyplugh" not in content and b"frobozzle" not in content
            assert b"ordinary words" in content or not file.name.endswith("sqlite3")


OPERATIONS = st.sampled_from(
    ["create", "talk", "talk", "talk", "fork", "fork", "undo", "delete", "delete turn"]
)


@given(
    st.lists(
        st.tuples(OPERATIONS, st.integers(0, 99), st.integers(0, 99)), min_size=15, max_size=40
    )
)
@settings(max_examples=35, deadline=None, derandomize=True, database=None)
def test_any_history_of_branches_reads_as_a_model_of_plain_lists_says(
    operations: list[tuple[str, int, int]],
) -> None:
    """`operations`: what to do, to which session (modulo), at which turn (modulo)."""
    with TemporaryDirectory() as folder, Conversations(Path(folder) / "c.sqlite3") as store:
        # Nothing is killed here, and waiting for the disk would take most of the time.
        store._database._conn.execute("PRAGMA synchronous=OFF")
        model: dict[str, list[str]] = {store.create_session().id: []}
        for number, (operation, session_number, turn_number) in enumerate(operations):
            if operation == "create" or not model:
                model[store.create_session().id] = []
                continue
            session = store.get_session(list(model)[session_number % len(model)])
            said = model[session.id]
            turn = turn_number % (len(said) + 1)
            if operation == "talk":
                say(store, session, str(number))
                model[session.id] = [*said, str(number)]
            elif operation == "fork":
                model[store.fork(session.id, turn).id] = said[:turn]
            elif operation == "undo":
                chain = store.chain(session.id)
                with store.lease(session.id):
                    store.move_head(session.id, chain[turn - 1].id if turn else None)
                model[session.id] = said[:turn]
            elif operation == "delete turn":
                forget_last(store, model, session)
            else:
                store.delete_session(session.id)
                del model[session.id]
                assert_reads_as(store, model)
        assert_reads_as(store, model)


def forget_last(store: Conversations, model: dict[str, list[str]], session: Session) -> None:
    """Delete a session's newest turn; what follows it elsewhere, also a branch that was left
    behind, keeps it."""
    said = model[session.id]
    if not said:
        return
    assert session.head is not None
    last, inside = said[-1], [one for other in model.values() for one in other[:-1]]
    if store.delete_turn(session.head):
        assert last not in inside
        for ended in [one for one, texts in model.items() if texts[-1:] == [last]]:
            model[ended] = model[ended][:-1]
            if not model[ended] and ended not in {one.id for one in store.list_sessions()}:
                del model[ended]
    else:
        follows = "SELECT 1 FROM turns WHERE parent_id = ?"
        with store._database.read() as conn:
            assert conn.execute(follows, (session.head,)).fetchone()


def assert_reads_as(store: Conversations, model: dict[str, list[str]]) -> None:
    listed = {session.id: session for session in store.list_sessions()}
    assert listed.keys() == model.keys()
    for session_id, said in model.items():
        assert texts(store, listed[session_id]) == said
        assert listed[session_id].num_turns == len(said)
    with store._database.read() as conn:
        unowned = "SELECT count(*) FROM turns WHERE session_id NOT IN (SELECT id FROM sessions)"
        assert conn.execute(unowned).fetchone() == (0,), "a turn without a living owner"
        assert conn.execute("PRAGMA foreign_key_check").fetchall() == []


# --- the outside of the file --------------------------------------------------------------------


def test_export_is_plain_json_with_every_turn(store: Conversations) -> None:
    session = store.create_session(title="main", model="M")
    for text in ("a", "b"):
        say(store, session, text, reply=text * 2)
    exported = json.loads(json.dumps(store.export_text(session.id)))
    assert (exported["format"], exported["session"]) == ("chatkv-conversation", session.id)
    assert [turn["user"] for turn in exported["turns"]] == ["a", "b"]
    assert [turn["reply"] for turn in exported["turns"]] == ["aa", "bb"]
    assert exported["turns"][1]["prompt_ids"] == [7, 8]
    assert exported["turns"][1]["reply_ids"] == [1, 2, 3]


def test_files_are_the_owners_alone(store: Conversations) -> None:
    session = store.create_session()
    with store.lease(session.id):
        for path in store.path.parent.rglob("*"):
            wanted = 0o700 if path.is_dir() else 0o600
            assert stat.S_IMODE(path.stat().st_mode) == wanted, path
    assert stat.S_IMODE(store.path.parent.stat().st_mode) == 0o700


def test_a_file_open_to_others_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "c.sqlite3"
    Conversations(path).close()
    path.chmod(0o644)
    Conversations(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_short_ids_name_one_session_each(store: Conversations, clock: Clock) -> None:
    sessions = []
    for pause_s in (0, 0, 0.002, 5, 86_400 * 30):
        clock.now_s += pause_s
        sessions.append(store.create_session())
    short = store.short_ids()
    assert short.keys() == {session.id for session in sessions}
    for session in sessions:
        assert store.get_session(short[session.id]) == session
        assert 8 <= len(short[session.id]) <= 26
    assert len(short[sessions[4].id]) == 8


def test_the_token_log_is_every_turn_in_order(store: Conversations) -> None:
    session = store.create_session()
    assert list(store.token_log(session.id)) == []
    say(store, session, "a")
    say(store, session, "b")
    assert list(store.token_log(session.id)) == [7, 8, 1, 2, 3, 7, 8, 1, 2, 3]
    assert list(store.token_log(store.fork(session.id, 1).id)) == [7, 8, 1, 2, 3]
