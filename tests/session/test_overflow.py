"""A conversation that outgrows the context: refused with numbers, or oldest turns leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from chatkv.client import ChatRequest, OpenChat, open_chat
from chatkv.engine.options import SamplingOptions
from chatkv.engine.pool import BlockPool
from chatkv.engine.sequence import TokenSequence
from chatkv.engine.shift import take_out
from chatkv.errors import ContextFull
from chatkv.model.config import ModelConfig
from chatkv.model.rope import inverse_frequencies
from chatkv.paths import folders
from chatkv.session.turn import Overflow, TurnOptions, TurnResult
from chatkv_kernels.rerotate import turn
from chatkv_kernels.rope import rope
from chatkv_store.conversations import Conversations
from chatkv_store.records import Window

SYSTEM = "You are a sailor."
TEXT = "Tell me more about the sea, the ship, its captain and the cat. "


@pytest.fixture
def model(home: Path, tiny_checkpoint: Callable[..., Path]) -> str:
    return str(tiny_checkpoint("llama3"))  # a context of 1024 tokens


@contextmanager
def opened(model: str, session: str | None = None) -> Iterator[OpenChat]:
    with open_chat(folders(), ChatRequest(model, "float32", resume=session, seed=1)) as chat:
        yield chat


def say(chat: OpenChat, number: int, overflow: Overflow = "refuse") -> TurnResult:
    options = TurnOptions(
        SamplingOptions(temperature=0), max_tokens=8, restore="reload", overflow=overflow
    )
    system = SYSTEM if number == 0 else None
    return chat.conversation.send(f"{number}: {TEXT * 2}", options, system=system)


def fill(chat: OpenChat) -> int:
    """Talk until the next message would not fit; how many turns that took."""
    for number in range(100):
        try:
            say(chat, number)
        except ContextFull:
            return number
    raise AssertionError("the context never ends")


def test_it_is_refused_with_the_numbers_and_nothing_is_lost(model: str) -> None:
    with opened(model) as chat:
        turns = fill(chat)
        assert len(chat.conversation.turns) == turns > 4
        with pytest.raises(
            ContextFull, match=r"has \d+ tokens .* adds \d+, .* ends at 1024.*--over"
        ):
            say(chat, turns)


@pytest.mark.parametrize("overflow", ["shift", "recompute"])
def test_oldest_turns_leave_and_the_system_prompt_stays(model: str, overflow: Overflow) -> None:
    with opened(model) as chat:
        turns = fill(chat)
        whole = chat.conversation.log
        result = say(chat, turns, overflow)
        conversation = chat.conversation
        window = conversation.window
        assert window is not None and window.first_turn > 2
        assert f"{window.first_turn - 1} of {turns} turns no longer fit" in result.notices[0]
        assert ("roughly" in result.notices[0]) == (overflow == "shift")
        decode = chat.runtime.tokenizer.decode
        kept = decode(conversation.log[: window.num_kept], skip_special=False)
        text = decode(conversation.log, skip_special=False)
        assert kept in (f"<|im_start|>system\n{SYSTEM}", f"<|im_start|>system\n{SYSTEM}<|im_end|>")
        behind = f"{SYSTEM}<|im_end|>\n<|im_start|>user\n{window.first_turn - 1}: "
        assert text.startswith(f"<|im_start|>system\n{behind}")
        assert len(conversation.log) <= 1024 / 2 + 100
        # Every word is still there to be read, and the model's log ends like the whole one.
        assert [turn.user_text[:1] for turn in conversation.turns][:3] == ["0", "1", "2"]
        assert conversation.log[window.num_kept :][: len(whole)] != whole[window.num_kept :]
        if overflow == "shift":
            assert result.tokens.computed < 200 and result.tokens.reused > 200
        else:
            assert result.tokens.computed > 300
        again = say(chat, turns + 1, overflow)
        assert conversation.window == window, "room was made for more than one turn"
        assert again.tokens.computed < 200


def test_computed_again_it_is_what_a_conversation_of_these_turns_would_be(model: str) -> None:
    with opened(model) as chat:
        turns = fill(chat)
        say(chat, turns, "recompute")
        conversation = chat.conversation
        ids = conversation.log[:-1]
        assert conversation.sequence.exact_until is None
        fresh = TokenSequence(ids)
        with chat.runtime.engine.memory.use(fresh):
            chat.runtime.engine.prefill(fresh)
            mine = kv_of(chat, conversation.sequence, len(ids))
            assert torch.allclose(mine, kv_of(chat, fresh, len(ids)), atol=1e-4)


def kv_of(chat: OpenChat, sequence: TokenSequence, num_tokens: int) -> torch.Tensor:
    return chat.runtime.engine.pool.slots(sequence.run, 0, num_tokens).clone()


@pytest.mark.parametrize("overflow", ["shift", "recompute"])
def test_it_goes_on_after_a_restart(model: str, overflow: Overflow) -> None:
    with opened(model) as chat:
        turns = fill(chat)
        session = say(chat, turns, overflow).session
        log, window = chat.conversation.log, chat.conversation.window
    with opened(model, session) as chat:
        assert (chat.conversation.log, chat.conversation.window) == (log, window)
        result = say(chat, turns + 1, overflow)
    if overflow == "recompute":
        assert result.tokens.loaded > 300 and result.tokens.computed < 200
    else:  # KV that is only roughly right is never stored
        assert result.tokens.computed > 300
        assert any("computed again" in notice for notice in result.notices)


def test_taking_turns_back_brings_the_whole_context_back(model: str) -> None:
    with opened(model) as chat:
        turns = fill(chat)
        log, session = chat.conversation.log, chat.conversation.session.id
    with opened(model, session) as chat:  # the whole of it is written now
        say(chat, turns, "shift")
        chat.conversation.rewind(turns)
        assert chat.conversation.window is None and chat.conversation.log == log
        chat.conversation.rewind(turns - 1)
        result = say(chat, turns - 1)
        assert result.tokens.loaded > 500, "the KV of the shift is no one's but its own"


def test_the_store_knows_both_logs(model: str) -> None:
    with opened(model) as chat:
        turns = fill(chat)
        whole = chat.conversation.log
        session = say(chat, turns, "recompute").session
        log = chat.conversation.log
    with Conversations(folders().conversations) as conversations:
        assert list(conversations.token_log(session)) == log
        logs = [list(ids) for ids in conversations.token_logs(session)]
        assert log in logs and any(ids[: len(whole)] == whole for ids in logs)
        last = conversations.chain(session)[-1]
        assert Window.of(last.stats) is not None


CONFIG = ModelConfig("llama", 8, 16, 16, 2, 2, 1, 8, 1e-5, 1e4, 512)


def test_moved_keys_are_those_of_their_new_positions() -> None:
    """Against keys that are rotated for the new positions from the start."""
    pool = BlockPool(CONFIG, 4, torch.float32, torch.device("cpu"))
    torch.manual_seed(0)
    bare, values = torch.randn(2, 1, 200, 8), torch.randn(2, 1, 200, 8)

    def rotated(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = turn(positions, inverse_frequencies(CONFIG)[0])
        return torch.stack(
            [rope(layer.transpose(0, 1), cos, sin).transpose(0, 1) for layer in keys]
        )

    sequence = TokenSequence(list(range(200)), num_cached=190)
    pool.reserve(sequence.run, 200)
    slots = pool.slots(sequence.run, 0, 200)
    slots[:, 0], slots[:, 1] = rotated(bare, torch.arange(200)), values
    take_out(pool, sequence, 5, 150)
    assert sequence.ids == [*range(5), *range(150, 200)]
    assert (sequence.num_cached, sequence.exact_until) == (45, 5)
    left = torch.cat([torch.arange(5), torch.arange(150, 190)])
    found = pool.slots(sequence.run, 0, 45)
    assert torch.allclose(found[:, 0], rotated(bare[:, :, left], torch.arange(45)), atol=1e-5)
    assert torch.equal(found[:, 1], values[:, :, left])
