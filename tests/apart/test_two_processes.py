"""Prefill in one process, decode in another: the same answers, whatever happens between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chatkv.engine.pool import BLOCK_TOKENS
from chatkv.restore import prefill_worker, remote
from chatkv.server.listen import Access
from chatkv.session.turn import Listener
from decoders import LONG, Decoder
from engines import eventually
from prefillers import Link, Prefiller, folders_in, prefiller

pytestmark = pytest.mark.slow
Decoders = Callable[..., Decoder]


def assert_fetched(result: Any, tokens: int | None = None) -> None:
    """All but the last token came from the worker."""
    assert result.plan.chosen == "remote" and not result.notices
    assert result.remote is not None and result.remote["failure"] is None
    assert result.tokens.remote == (result.tokens.prompt - 1 if tokens is None else tokens)
    assert result.tokens.computed == 1


def assert_here(result: Any, *says: str) -> None:
    """Some or all was computed here, and why is told."""
    assert result.tokens.computed > 1
    notice = next(line for line in result.notices if line.startswith("the prefill worker at"))
    assert all(text in notice for text in says), notice


def test_the_answer_is_that_of_one_process(
    worker: Prefiller, decoder: Decoders, alone: list[str]
) -> None:
    talk = decoder(worker.at())
    first = talk.say()
    assert first.text == alone[0]
    assert_fetched(first)
    assert first.remote["bytes"] >= first.tokens.remote * talk.runtime.layout.bytes_per_token
    second = talk.say("And why?", restore="auto")
    assert second.text == alone[1]
    assert second.tokens.reused >= first.tokens.prompt


def test_what_was_fetched_is_kept_by_the_decode_worker(
    worker: Prefiller, decoder: Decoders, alone: list[str]
) -> None:
    talk = decoder(worker.at())
    talk.say()
    session = talk.conversation.session
    talk.conversation.close()
    talk.runtime.close()
    later = decoder()
    with later.runtime.open(later.runtime.conversations.get_session(session.id)) as conversation:
        again = Decoder(later.runtime, conversation).say("And why?", restore="auto", exact=True)
    assert again.text == alone[1]
    assert again.tokens.loaded > 1000 and again.tokens.remote == 0


def test_a_worker_goes_on_from_what_it_has(
    worker: Prefiller, decoder: Decoders, alone: list[str]
) -> None:
    """The second turn asks for what is new alone; the worker has the first in memory."""
    talk = decoder(worker.at())
    talk.say()
    more = "And what of the moon, which is said to pull at it from far away, night by night? " * 4
    second = talk.say(more)
    assert_fetched(second, tokens=second.tokens.prompt - 1 - second.tokens.reused)
    assert second.tokens.reused >= 1000
    fetched = second.remote["bytes"] // talk.runtime.layout.bytes_per_token
    assert fetched - second.tokens.remote < BLOCK_TOKENS


def test_history_that_is_nowhere_comes_from_the_worker_and_the_rest_from_disk(
    worker: Prefiller, decoder: Decoders, alone: list[str]
) -> None:
    """KV on disk is loaded, what is not there is fetched."""
    talk = decoder(worker.at())
    talk.say()
    disk = talk.runtime.restorer.disk
    assert disk is not None and disk.writer.flush(30)
    found = disk.store.match(disk.namespace, talk.conversation.log[:-1], talk.runtime.layout)
    disk.store.remove([block.key for block in found.blocks[10:]])
    talk.runtime.forget(talk.conversation.session.id)
    talk.conversation.sequence.become([], 0)
    talk.conversation.sequence = talk.runtime.restorer.sequence("another")
    second = talk.say("And why?")
    assert second.text == alone[1]
    assert second.tokens.loaded == 10 * BLOCK_TOKENS
    assert second.tokens.remote == second.tokens.prompt - 1 - 10 * BLOCK_TOKENS


def test_exact_asks_nobody(worker: Prefiller, decoder: Decoders) -> None:
    talk = decoder(worker.at())
    assert talk.say("Hello, who are you? " * 20, exact=True).remote is None


def test_lossy_kv_is_quantised_once_from_what_was_fetched(
    worker: Prefiller, decoder: Decoders, alone: list[str]
) -> None:
    talk = decoder(worker.at(), kv_codec="int8")
    first = talk.say()
    assert_fetched(first)
    assert first.text == alone[0]


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.9])
def test_a_worker_that_is_killed_costs_time_only(
    tmp_path: Path, model: str, decoder: Decoders, alone: list[str], share: float
) -> None:
    """kill -9 after a part of the KV has passed: at once, in the middle, near the end. What is on
    its way then is lost too."""
    with prefiller(tmp_path / "prefill", model, min_value_bytes=1) as worker:
        link = Link(worker.url)
        with link.url() as url:
            talk = decoder(worker.at(url=url))
            tokens = len(talk.conversation.prompt_ids(LONG))
            after = share * tokens * talk.runtime.layout.bytes_per_token

            def kill(passed: int) -> None:
                if passed > after:
                    worker.kill()
                    link.cut()

            link.on_kv = kill
            first = talk.say()
    assert first.text == alone[0]
    assert_here(first, "computed here")
    assert talk.say("And why?").text == alone[1]


def test_a_worker_that_is_gone_is_not_asked_each_time(
    tmp_path: Path, model: str, decoder: Decoders, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_worker, "AWAY_S", 1000.0)
    with prefiller(tmp_path / "prefill", model) as worker:
        at = worker.at()
    talk = decoder(at)
    first = talk.say()
    assert first.text == alone[0] and first.plan.chosen == "none"
    assert_here(first, "is away")
    # Another one is there now, and nobody looks.
    asked = []
    monkeypatch.setattr(type(at.transport), "state", lambda *_: asked.append(1))
    assert_here(talk.say("Why? " * 100), "is away")
    assert not asked


def test_a_worker_that_stops_answering_is_given_up(
    tmp_path: Path, model: str, decoder: Decoders, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP: the connection stands, and nothing comes."""
    import os
    import signal

    with prefiller(tmp_path / "prefill", model, min_value_bytes=1) as worker:
        link = Link(worker.url)
        link.on_kv = lambda passed: os.kill(worker.process.pid, signal.SIGSTOP)
        with link.url() as url:
            talk = decoder(worker.at(url=url))
            monkeypatch.setattr(prefill_worker, "SILENT_S", 1.0)
            first = talk.say()
        os.kill(worker.process.pid, signal.SIGCONT)
    assert first.text == alone[0]
    assert_here(first, "does not answer in time")


def test_a_link_that_is_too_slow_is_given_up(
    worker: Prefiller, decoder: Decoders, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Link(worker.url)
    with link.url() as url:
        at = worker.at(url=url)
        talk = decoder(at)
        monkeypatch.setattr(remote, "PATIENCE_S", 0.2)
        at.offered(talk.runtime.model)  # the link is measured while it is fast
        link.bytes_per_s = 100e3
        first = talk.say()
        assert first.text == alone[0]
        assert_here(first, "was too slow")
        assert first.remote["bytes"] > 0 and first.remote["tokens"] < first.tokens.prompt - 1
        assert first.remote["bytes_per_s"] < 1e6


def test_a_slow_link_with_a_delay_brings_all_that_was_asked_for(
    worker: Prefiller, decoder: Decoders, alone: list[str]
) -> None:
    link = Link(worker.url, bytes_per_s=4e6, delay_s=0.05)
    with link.url() as url:
        talk = decoder(worker.at(url=url))
        first = talk.say()
    assert first.text == alone[0]
    assert_fetched(first)
    assert first.remote["predicted"]["transfer_ms"] > 100


@pytest.mark.parametrize("how", ["flipped", "cut", "swapped", "left out", "end first"])
def test_frames_that_are_not_right_are_thrown_away(
    worker: Prefiller, decoder: Decoders, alone: list[str], how: str
) -> None:
    def tamper(frames: list[bytes]) -> list[bytes]:
        at = len(frames) // 2
        while len(frames[at]) < 1000:
            at += 1
        front, rest = frames[:at], frames[at:]
        if how == "flipped":
            return [*front, rest[0][:500] + bytes([rest[0][500] ^ 1]) + rest[0][501:], *rest[1:]]
        if how == "cut":
            return [*front, rest[0][:500], b""]
        if how == "swapped":
            return [*front, rest[1], rest[0], *rest[2:]]
        return [*front, *rest[1:]] if how == "left out" else [*front, rest[-1]]

    link = Link(worker.url, tamper=tamper)
    with link.url() as url:
        talk = decoder(worker.at(url=url))
        first = talk.say()
    assert first.text == alone[0]
    assert_here(first, "ended before" if how == "cut" else "cannot be used")
    assert 0 < first.remote["tokens"] < first.tokens.prompt - 1


def test_other_weights_are_refused_by_their_digest(
    worker: Prefiller, decoder: Decoders, tiny_checkpoint: Callable[..., Path]
) -> None:
    other = str(tiny_checkpoint("llama3", max_position_embeddings=4096, seed=1))
    talk = decoder(worker.at(), of=other)
    alone = decoder(of=other).say(restore="auto")
    first = talk.say()
    assert first.text == alone.text
    assert_here(first, "other weights")
    assert first.tokens.remote == 0


def test_weights_that_change_between_the_question_and_the_request_are_refused_too(
    worker: Prefiller, decoder: Decoders, alone: list[str], tiny_checkpoint: Callable[..., Path]
) -> None:
    """The state was asked of one worker, the request goes to another with other weights."""
    other = str(tiny_checkpoint("llama3", max_position_embeddings=4096, seed=1))
    at = worker.at()
    talk = decoder(at)
    at.offered(talk.runtime.model)
    with prefiller(Path(talk.runtime.folders.cache) / "other", other) as wrong:
        object.__setattr__(at.transport, "url", wrong.url)
        first = talk.say()
    assert first.text == alone[0]
    assert_here(first, "refuses: it has other weights")


def test_the_token_is_asked_for(
    tmp_path: Path, model: str, decoder: Decoders, alone: list[str]
) -> None:
    access = Access(tokens=("right",))
    about: dict[str, Any] = {"access": access, "token": "right", "min_value_bytes": 1}
    with prefiller(tmp_path / "prefill", model, **about) as worker:
        for token in (None, "wrong"):
            place = folders_in(tmp_path / f"with {token}")
            first = decoder(worker.at(token), place).say()
            assert first.text == alone[0]
            assert_here(first, "refuses the token")
        right = decoder(worker.at("right"), folders_in(tmp_path / "right")).say()
        assert right.text == alone[0]
        assert_fetched(right)


def test_a_cancelled_turn_ends_at_once_and_the_worker_stops(
    worker: Prefiller, decoder: Decoders
) -> None:
    link = Link(worker.url, bytes_per_s=300e3)
    stop = threading.Event()
    link.on_kv = lambda passed: stop.set() if passed > 100e3 else None
    with link.url() as url:
        at = worker.at(url=url)
        talk = decoder(at)
        done = talk.say(listener=Listener(cancelled=stop.is_set))
        assert done.finish_reason == "interrupted" and not done.text
        eventually(lambda: worker.at().transport.state(5).queue_s == 0)
        assert at._away_until == 0  # it has done nothing wrong


def test_a_worker_on_the_same_store_puts_kv_there(
    home: Path, model: str, decoder: Decoders, alone: list[str]
) -> None:
    with prefiller(home, model, min_value_bytes=1) as worker:
        talk = decoder(worker.at())
        first = talk.say()
        assert first.text == alone[0]
        assert_fetched(first)
        whole = (first.tokens.prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert first.remote["stored_tokens"] == whole
        assert first.remote["bytes"] < BLOCK_TOKENS * talk.runtime.layout.bytes_per_token
        disk = talk.runtime.restorer.disk
        assert disk is not None and disk.writer.flush(30)
        written = disk.writer.stats().written
        assert written <= 2  # the tail alone: the others are there already
        assert talk.say("And why?").text == alone[1]


def test_blocks_come_through_the_store_behind_a_front_that_is_here(
    home: Path, model: str, decoder: Decoders
) -> None:
    """Another conversation begins alike, with a part of a block: what that block holds else is in
    no store, and what follows is loaded all the same."""
    other = "Of rivers, rather. " + LONG
    with prefiller(home, model, min_value_bytes=1) as worker:
        talk = decoder(worker.at())
        talk.say()
        session = talk.runtime.new_session(seed=7)
        with talk.runtime.open(session) as conversation:
            second = Decoder(talk.runtime, conversation).say(other)
    front = second.tokens.reused + second.tokens.loaded
    assert 0 < front < BLOCK_TOKENS
    assert_fetched(second, tokens=second.tokens.prompt - 1 - front)
    whole = (second.tokens.prompt - 1) // BLOCK_TOKENS - 1
    assert second.remote["stored_tokens"] == whole * BLOCK_TOKENS


def test_an_owner_keeps_to_itself_in_a_shared_store(
    home: Path, model: str, decoder: Decoders, alone: list[str]
) -> None:
    with prefiller(home, model, min_value_bytes=1) as worker:
        at = worker.at()
        ada = decoder(at, owner="a" * 64)
        first = ada.say()
        assert first.text == alone[0] and first.remote["stored_tokens"] > 0
        disk = ada.runtime.restorer_for("lossless", "a" * 64).disk
        assert disk is not None
        log, layout = ada.conversation.log[:-1], ada.runtime.layout
        assert disk.store.match(disk.namespace, log, layout).num_tokens >= 15 * BLOCK_TOKENS
        others = ada.runtime.namespace_of("lossless")
        assert disk.store.match(others, log, layout).num_tokens == 0


def test_blocks_that_a_full_store_refuses_are_sent(
    home: Path, model: str, decoder: Decoders, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHATKV_KV_MAX_BYTES", "1")
    with prefiller(home, model, min_value_bytes=1) as worker:
        talk = decoder(worker.at())
        first = talk.say()
    assert first.text == alone[0]
    assert_fetched(first)
    assert first.remote["stored_tokens"] == 0


def test_several_at_once_have_turns(
    worker: Prefiller, decoder: Decoders, alone: list[str], tmp_path: Path
) -> None:
    talks = [decoder(worker.at(), folders_in(tmp_path / str(index))) for index in range(3)]
    answers: list[Any] = [None] * 3

    def say(index: int) -> None:
        answers[index] = talks[index].say()

    threads = [threading.Thread(target=say, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for answer in answers:
        assert answer.text == alone[0]
        assert_fetched(answer)
