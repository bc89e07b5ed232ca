"""A session and its codec: resumes work with every one, and nothing is quantised twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest

from chatkv.client import ChatRequest, KVCodec, OpenChat, open_chat
from chatkv.engine.sampling import SamplingOptions
from chatkv.errors import PersistenceError
from chatkv.paths import folders
from chatkv.restore.staging import reach
from chatkv.session.turn import TurnOptions, TurnResult
from chatkv_store import codec as codecs
from chatkv_store.blocks import StoredBlock

CODECS = get_args(KVCodec)
LOSSY = [name for name in CODECS if codecs.is_lossy(codecs.by_name(name))]
QUESTIONS = ("Tell me a long story about the sea and the wind. " * 6, "Go on.", "And then?")


@pytest.fixture
def model(home: Path, tiny_checkpoint: Callable[..., Path]) -> str:
    return str(tiny_checkpoint("yarn"))  # its keys carry a magnitude too


@contextmanager
def opened(
    model: str, session: str | None = None, kv_codec: Any = None, dtype: Any = "bfloat16"
) -> Iterator[OpenChat]:
    request = ChatRequest(model, dtype, resume=session, seed=1, kv_codec=kv_codec)
    with open_chat(folders(), request) as chat:
        yield chat


def say(chat: OpenChat, text: str, **options: Any) -> TurnResult:
    fields = {"sampling": SamplingOptions(temperature=0), "max_tokens": 30} | options
    result = chat.conversation.send(text, TurnOptions(**fields))
    disk = chat.runtime.restorer.disk
    assert disk is not None and disk.writer.flush(30)
    assert disk.writer.stats().error is None
    return result


def stored(chat: OpenChat, ids: Sequence[int]) -> list[StoredBlock]:
    disk = chat.runtime.restorer.disk
    assert disk is not None
    return disk.store.match(disk.namespace, ids, chat.runtime.layout).blocks


def kv_of_pool(chat: OpenChat) -> npt.NDArray[Any]:
    sequence = chat.conversation.sequence
    layout = chat.runtime.layout
    kv = reach(chat.runtime.engine.pool, layout)
    taken = kv.take(sequence.run, 0, sequence.num_cached, "raw")
    return np.concatenate([taken.value(group) for group in range(layout.num_values)])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", CODECS)
def test_a_resume_loads_everything_and_finds_nothing_wrong(
    name: str, dtype: str, model: str
) -> None:
    with opened(model, kv_codec=name, dtype=dtype) as chat:
        first = say(chat, QUESTIONS[0])
        before = kv_of_pool(chat)
        session, log = chat.conversation.session.id, chat.conversation.log
        full, tail = stored(chat, log[: before.shape[3]])[:-1], stored(chat, log)[-1]
        assert len(full) >= 3
        assert {block.header.codec for block in full} == {codecs.by_name(name).id}
        if name in LOSSY:  # what may still grow is not quantised
            assert tail.header.codec == codecs.by_name("lossless").id
    with opened(model, session, dtype=dtype) as chat:  # the codec is the session's own
        assert chat.runtime.kv_codec == name
        second = say(chat, QUESTIONS[1], max_tokens=1, restore="reload")
        assert first.notices == second.notices == ()
        assert second.tokens.loaded == len(log) - 1 == before.shape[3]
        after = kv_of_pool(chat)[:, :, :, : before.shape[3]]
        start = 64 * len(full) if name in LOSSY else 0
        np.testing.assert_array_equal(after[:, :, :, start:], before[:, :, :, start:])
        if name in LOSSY:
            assert not np.array_equal(after, before)
            np.testing.assert_array_equal(after[:, :, :, :4], before[:, :, :, :4])  # the sinks


@pytest.mark.parametrize("name", LOSSY)
def test_blocks_of_a_resumed_session_are_never_encoded_again(name: str, model: str) -> None:
    """Sessions of several processes: what is stored once stays the same bytes for ever."""
    session, digests = None, {}
    for text in QUESTIONS:
        with opened(model, session, kv_codec=name if session is None else None) as chat:
            say(chat, text, max_tokens=50)
            session = chat.conversation.session.id
            for block in stored(chat, chat.conversation.log):
                if block.header.num_tokens == 64:
                    entries = tuple(value.digest for value in block.header.values)
                    assert digests.setdefault(block.key, entries) == entries
                    assert block.header.codec == codecs.by_name(name).id
    assert len(digests) >= 4


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("restarts", [False, True])
def test_the_front_of_a_lossy_block_is_kept_by_what_grows_from_it(
    name: str, restarts: bool, model: str
) -> None:
    """Another question after the same beginning cuts into a quantised block. The new block's KV
    before the cut has been quantised, so the new block must not be, not even when it becomes full
    in a later process; the block after it is quantised as usual."""
    shared = "The same long beginning of two questions, word for word. " * 4
    with opened(model, kv_codec=name) as chat:
        say(chat, shared + "First ending, which is quite different. " * 4, max_tokens=1)
        ids = chat.conversation.log
    with opened(model, kv_codec=name) as chat:
        result = say(chat, shared + "other end", max_tokens=1, restore="reload")
        session, loaded = chat.conversation.session.id, result.tokens.loaded
        assert loaded % 64, "the cut is not inside a block: change the texts"
        cut = loaded // 64
        assert loaded < len(chat.conversation.log) < 64 * (cut + 1)
        tail = stored(chat, chat.conversation.log[:-1])[cut]
        assert tail.header.codec == codecs.by_name(codecs.KEPT).id
        before = kv_of_pool(chat)
        if not restarts:
            say(chat, "More words. " * 20, max_tokens=1)
            blocks = stored(chat, chat.conversation.log)
    if restarts:
        with opened(model, session) as chat:
            say(chat, "More words. " * 20, max_tokens=1, restore="reload")
            blocks = stored(chat, chat.conversation.log)
            after = kv_of_pool(chat)[:, :, :, : before.shape[3]]
            np.testing.assert_array_equal(after, before)
    assert blocks[cut].header.num_tokens == 64
    assert blocks[cut].header.codec == codecs.by_name(codecs.KEPT).id
    assert blocks[cut + 1].header.num_tokens == 64
    assert blocks[cut + 1].header.codec == codecs.by_name(name).id
    assert ids[:loaded] == chat.conversation.log[:loaded]


def test_families_share_nothing(model: str) -> None:
    with opened(model) as chat:
        spaces = {name: chat.runtime.namespace_of(name) for name in CODECS}
    assert len({spaces[name] for name in CODECS if name not in LOSSY}) == 1
    assert len(set(spaces.values())) == 1 + len(LOSSY)


def test_lossless_codecs_read_each_other(model: str) -> None:
    with opened(model, kv_codec="packed") as chat:
        say(chat, QUESTIONS[0], max_tokens=1)
        session = chat.conversation.session.id
        held = len(chat.conversation.log) - 1
    with opened(model, session, kv_codec="raw") as chat:
        assert say(chat, "Go on.", restore="reload").tokens.loaded == held
    with opened(model, session) as chat:
        assert chat.runtime.kv_codec == "raw"  # what was said last is remembered


def test_another_family_is_computed_again_and_said(model: str) -> None:
    with opened(model) as chat:
        say(chat, QUESTIONS[0], max_tokens=1)
        session = chat.conversation.session.id
    with opened(model, session, kv_codec="int8") as chat:
        result = say(chat, "Go on.", max_tokens=1)
        assert result.tokens.loaded == 0
        assert "computed again" in result.notices[0]


def test_exact_refuses_what_a_lossy_codec_has_changed(model: str) -> None:
    with opened(model, kv_codec="int4") as chat:
        say(chat, QUESTIONS[0], max_tokens=1, exact=True)
        say(chat, "In memory it is exact.", max_tokens=1, exact=True)
        session, turns = chat.conversation.session.id, len(chat.conversation.turns)
    with opened(model, session) as chat:
        with pytest.raises(PersistenceError, match="int4"):
            say(chat, "Go on.", exact=True)
        assert len(chat.conversation.turns) == turns
        assert say(chat, "Go on.", max_tokens=1).notices == ()
