"""Turns in the full-screen chat: said, streamed, stopped, failed, gone on with, changed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from asynchronous import asynchronous
from chatkv.client import ChatRequest
from chatkv.client.link import EngineGone
from chatkv.errors import ContextFull, ModelError, UsageError
from chatkv.tui import conversation_view
from chatkv.tui.choice_screen import ChoiceScreen
from chatkv.tui.panels import ProgressLine
from chatkv_store.conversations import Conversations
from scripted_chat import Script

Tui = Callable[..., AbstractAsyncContextManager[Any]]


@asynchronous
async def test_it_can_be_typed_in_before_the_engine_has_started(tui: Tui, script: Script) -> None:
    script.hold_open = threading.Event()
    async with tui() as chat:
        await chat.until(lambda: script.opened)
        assert "Message, or / for commands" in "\n".join(chat.lines)
        await chat.until(lambda: "preparing the model" in chat.text("#progress"))
        assert "preparing the model" in chat.status
        await chat.enter("already there?")
        assert chat.turns == [("already there?", "")]
        script.hold_open.set()
        await chat.idle()
        assert chat.turns == [("already there?", "Hello **there**.")]
        assert not chat.app.chat.query_one(ProgressLine).display


@asynchronous
async def test_a_burst_of_keys_is_a_message(tui: Tui, script: Script) -> None:
    """A terminal may send a line and its Enter at once, before any of it is painted."""
    from textual.events import Key

    async with tui() as chat:
        await chat.idle()
        for letter in "hi you":
            chat.app.post_message(Key("space" if letter == " " else letter, letter))
        chat.app.post_message(Key("enter", "\r"))
        await chat.until(lambda: script.sent)
        assert script.sent[0][0] == "hi you"
        await chat.idle()


@asynchronous
async def test_an_answer_is_markdown_and_the_status_tells_what_it_took(tui: Tui) -> None:
    async with tui(size=(240, 30)) as chat:
        await chat.idle()
        await chat.ask("hello")
        assert chat.turns == [("hello", "Hello **there**.")]
        assert "Hello there." in "\n".join(chat.lines)
        for part in ("ready", "32/8k", "200 reused + 1,000 loaded + 34 computed", "plan reload"):
            assert part in chat.status
        for part in ("first token 80 ms", "25 tokens/s", "from disk", "Scripted-1B"):
            assert part in chat.status
        assert len(chat.app.chat.conversation.views[0].answer.children) == 1
        assert chat.text("#title") == "hello"


@asynchronous
async def test_prefill_shows_what_the_cache_saved(tui: Tui, script: Script) -> None:
    script.progress = [("prefill", 1000, 4000), ("prefill", 2000, 4000)]
    script.pieces, script.hold = ["", "done"], threading.Event()
    async with tui() as chat:
        await chat.idle()
        await chat.enter("hello")
        await chat.until(lambda: "50%" in chat.text("#progress"))
        assert "2,000/4,000 tokens, 1,000 kept" in chat.text("#progress")
        assert "▓" in chat.text("#progress") and "reading" in chat.status
        script.hold.set()
        await chat.idle()


@asynchronous
async def test_stop_keeps_the_text_and_continue_goes_on(tui: Tui, script: Script) -> None:
    script.pieces, script.hold = ["One two", " three"], threading.Event()
    async with tui() as chat:
        await chat.idle()
        for key, number in (("escape", 1), ("ctrl+c", 2)):
            await chat.enter("count")
            await chat.until(lambda: chat.turns and chat.turns[-1][1] == "One two")
            await chat.enter("not now")  # is refused, and stays
            assert chat.app.chat.composer.text == "not now"
            chat.app.chat.composer.text = ""
            await chat.press(key)
            await chat.idle()
            assert chat.turns[-1] == ("count", "One two") and len(chat.turns) == number
            assert "[interrupted] /continue goes on" in "\n".join(chat.lines)
            assert "stopped" in chat.status
        script.hold = None
        script.pieces = [" and ", "four"]
        await chat.press("ctrl+g")
        await chat.until(lambda: chat.turns[-1][1] == "One two and four")
        await chat.idle()
        assert "[interrupted]" not in "\n".join(chat.lines[-8:])
        await chat.enter("/continue")
        assert "the last one is complete" in chat.notices[-1]
        assert "(2 of 2, F4)" in "\n".join(chat.lines)  # the shorter answer is a branch


@asynchronous
async def test_an_engine_that_dies_is_said_and_the_next_message_goes_on(
    tui: Tui, script: Script
) -> None:
    script.pieces = ["Half an", " answer"]
    script.break_off = EngineGone("the engine's process ended unexpectedly; what was said is saved")
    async with tui() as chat:
        await chat.idle()
        await chat.enter("hello")
        await chat.until(lambda: chat.notices)
        assert "ended unexpectedly" in chat.notices[0] and "failed" in chat.status
        assert chat.turns == [("hello", "Half an")]
        assert "[interrupted]" in "\n".join(chat.lines)
        await chat.ask("again")
        assert chat.turns == [("hello", "Half an"), ("again", "Half an answer")]


@asynchronous
async def test_what_is_refused_is_given_back(tui: Tui, script: Script) -> None:
    script.fail = UsageError("no\nsuch thing")
    async with tui() as chat:
        await chat.idle()
        await chat.enter("hello")
        await chat.until(lambda: chat.notices)
        assert chat.notices == ["no such thing"] and chat.turns == []
        assert chat.app.chat.composer.text == "hello"
        script.fail = RuntimeError("oops")  # not even a bug of ours ends the chat
        await chat.press("enter")
        await chat.until(lambda: len(chat.notices) == 2)
        assert "something went wrong here: RuntimeError('oops')" in chat.notices[1]
        await chat.press("enter")
        await chat.idle()
        assert len(chat.turns) == 1


@asynchronous
async def test_a_full_context_asks_what_to_do(tui: Tui, script: Script) -> None:
    async with tui() as chat:
        await chat.idle()
        await chat.ask("hello")
        script.fail = ContextFull("the context ends at 8192")
        await chat.enter("too much")
        await chat.until(lambda: isinstance(chat.app.screen, ChoiceScreen))
        assert "the context ends at 8192" in "\n".join(chat.lines)
        await chat.press("enter")  # the first choice: let the oldest turns leave
        await chat.until(lambda: len(chat.turns) == 2)
        await chat.idle()
        assert script.sent[-1][0] == "too much" and script.sent[-1][1].overflow == "shift"


@asynchronous
async def test_a_model_that_cannot_be_opened_is_said(tui: Tui, script: Script) -> None:
    script.open_fails = ModelError("no model at /nowhere")
    async with tui() as chat:
        await chat.until(lambda: chat.notices)
        assert chat.notices == ["no model at /nowhere"] and "not connected" in chat.status
        script.open_fails = ModelError("still none")
        await chat.enter("hello")
        await chat.until(lambda: len(chat.notices) == 3)
        assert chat.notices[1:] == ["still none", "the message was not sent"]
        await chat.press("enter")  # it was given back, and now goes through
        await chat.until(lambda: chat.turns)
        await chat.idle()
        assert len(chat.turns) == 1


@asynchronous
async def test_edit_regenerate_and_undo(tui: Tui, script: Script, store: Conversations) -> None:
    async with tui() as chat:
        await chat.idle()
        for text in ("one", "two", "three"):
            await chat.ask(text)
        composer = chat.app.chat.composer
        await chat.enter("/edit 2")
        assert composer.text == "two" and "editing turn 2" in composer.border_title
        await chat.press("escape")
        assert composer.text == "" and not composer.border_title
        await chat.enter("/edit 2")
        await chat.type(" and a half")
        await chat.press("enter")
        await chat.until(lambda: len(chat.turns) == 2)
        await chat.idle()
        assert [user for user, _ in chat.turns] == ["one", "two and a half"]
        assert "(2 of 2, F4)" in "\n".join(chat.lines)

        script.pieces = ["Another."]
        await chat.press("f5")
        await chat.until(lambda: chat.turns[-1][1] == "Another.")
        await chat.idle()
        assert len(chat.turns) == 2

        await chat.enter("/undo")
        await chat.until(lambda: chat.app.chat.facts and len(chat.app.chat.facts.turns) == 1)
        assert chat.turns == [("one", "Hello **there**.")]
        assert composer.text == "two and a half"
        session = store.list_sessions()[0]
        assert [turn.user_text for turn in store.chain(session.id)] == ["one"]
        for call, says in (("/edit 9", "from 1 to 1"), ("/regen x", "from 1 to 1")):
            composer.text = ""
            await chat.enter(call)
            assert says in chat.notices[-1]


@asynchronous
async def test_branches_can_be_chosen(tui: Tui, script: Script) -> None:
    async with tui() as chat:
        await chat.idle()
        await chat.enter("/branch")
        assert "nothing was left behind" in chat.notices[-1]
        await chat.ask("hello")
        script.pieces = ["Another."]
        await chat.press("f5")
        await chat.until(lambda: chat.turns[-1][1] == "Another.")
        await chat.idle()
        await chat.press("f4")
        shown = "\n".join(chat.lines)
        assert "1 turn, you are here" in shown and "1 turn, parts at turn 1" in shown
        await chat.press("escape", "f4", "down", "enter")
        await chat.until(lambda: chat.turns == [("hello", "Hello **there**.")])
        await chat.enter("/branch 2")
        await chat.until(lambda: chat.turns == [("hello", "Another.")])


@asynchronous
async def test_keys_on_a_turn(tui: Tui, script: Script, tmp_path: Any) -> None:
    script.pieces = ["```\nx = 1\n```"]
    async with tui() as chat:
        await chat.idle()
        await chat.ask("first")
        await chat.ask("second")
        await chat.press("alt+up", "up", "y")
        copied = tmp_path / "copied.txt"
        await chat.until(copied.exists)
        assert copied.read_text() == "```\nx = 1\n```"
        await chat.press("c")
        await chat.until(lambda: copied.read_text() == "x = 1\n")
        await chat.press("down", "e")
        assert chat.app.chat.composer.text == "second" and chat.app.chat.composer.has_focus
        await chat.press("escape", "alt+up", "k", "j", "enter")
        assert chat.app.chat.composer.has_focus
        await chat.press("alt+up", "up", "f")
        await chat.until(lambda: len(chat.turns) == 1)
        await chat.idle()
        assert "shares the turns up to 1" in chat.notices[0]
        await chat.press("alt+up", "r")
        await chat.until(lambda: len(script.sent) == 3)
        await chat.idle()


@asynchronous
async def test_a_resumed_conversation_is_shown_and_says_what_came_back(
    tui: Tui, script: Script, store: Conversations
) -> None:
    async with tui() as chat:
        await chat.idle()
        await chat.ask("what was that?")
    session = store.list_sessions()[0].id
    script.hold_open = threading.Event()
    async with tui(ChatRequest(resume=session)) as chat:
        await chat.until(lambda: chat.turns)  # though nothing is open yet
        assert not chat.app.chat.is_open
        script.hold_open.set()
        await chat.until(lambda: chat.notices)
        assert chat.notices == [
            "restored 1,200 of 32 tokens in 45 ms: 200 still in memory, 1,000 from disk"
        ]
        await chat.press("up")
        assert chat.app.chat.composer.text == "what was that?"  # its messages are the history


@asynchronous
async def test_a_crash_leaves_an_interrupted_answer_to_go_on_with(
    tui: Tui, script: Script, store: Conversations
) -> None:
    session = store.create_session(title="cut off", model="Scripted-1B").id
    with store.lease(session):
        turn = store.begin_turn(session, user_text="tell me", prompt_ids=[1])
        store.checkpoint_turn(turn.id, reply_text="Once upon", reply_ids=[2], rng_draws_after=1)
    store.recover()
    script.pieces = [" a time."]
    async with tui(ChatRequest(resume=session)) as chat:
        await chat.idle()
        assert "[interrupted]" in "\n".join(chat.lines)
        await chat.enter("/continue")
        await chat.until(lambda: chat.turns == [("tell me", "Once upon a time.")])
        await chat.idle()


@asynchronous
async def test_drafts_are_prefilled_while_they_are_typed(tui: Tui, script: Script) -> None:
    async with tui() as chat:
        await chat.idle()
        await chat.ask("hello")
        await chat.type("a draft of five words")
        await chat.until(lambda: script.drafts)
        await chat.until(lambda: "draft: 5 tokens ready" in chat.status)
        await chat.press("ctrl+c")
        assert "draft" not in chat.status
        await chat.type("/set te")
        await asyncio.sleep(0.5)
        assert script.drafts == ["a draft of five words"]  # a command is none


@asynchronous
async def test_a_very_long_answer_becomes_plain_text(tui: Tui, script: Script) -> None:
    from chatkv.tui.answer import MAX_LINES

    text = "".join(f"- line {number}\n" for number in range(MAX_LINES + 700))
    script.pieces = [text[:30_000], text[30_000:-500], text[-500:]]
    script.pieces = [text[: len(text) // 4], text[len(text) // 4 :]]
    async with tui() as chat:
        await chat.idle()
        await chat.ask("go on for ever")
        view = chat.app.chat.conversation.views[0]
        assert view.answer.is_plain and view.answer.text == text
        assert f"- line {MAX_LINES + 699}" in "\n".join(chat.lines)


@asynchronous
async def test_a_model_cannot_reach_the_terminal(tui: Tui, script: Script) -> None:
    script.pieces = ["red \x1b[31m bell \x07", "\x1b]0;gone\x07 end [bold]not markup[/bold]"]
    async with tui() as chat:
        await chat.idle()
        await chat.ask("attack \x1b[2J")
        shown = "".join(chat.lines)
        assert "\x1b" not in shown and "\x07" not in shown and "end [bold]not markup" in shown
        assert chat.turns[0][1] == "".join(script.pieces)  # what is kept is what was said


@asynchronous
async def test_a_long_conversation_shows_its_end_and_more_when_asked(
    tui: Tui, store: Conversations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation_view, "PAGE_TURNS", 3)
    session = store.create_session(title="long", model="M").id
    with store.lease(session):
        for number in range(8):
            turn = store.begin_turn(session, user_text=f"ask {number}", prompt_ids=[1])
            store.finish_turn(turn.id, reply_text=f"say {number}", reply_ids=[2], rng_draws_after=1)
    async with tui(ChatRequest(resume=session)) as chat:
        await chat.idle()
        assert [user for user, _ in chat.turns] == ["ask 5", "ask 6", "ask 7"]
        assert "… 5 earlier turns" in "\n".join(chat.lines)
        chat.app.chat.query_one(conversation_view.Earlier).focus()
        await chat.press("enter")
        await chat.until(lambda: len(chat.turns) == 6)
        assert chat.turns[0][0] == "ask 2"
        assert "… 2 earlier turns" in str(chat.app.chat.query_one(conversation_view.Earlier).visual)
        await chat.app.chat.conversation.show_earlier()
        assert len(chat.turns) == 8
        chat.app.chat.composer.focus()
        await chat.ask("and now")
        assert len(chat.turns) == 9


@asynchronous
async def test_the_conversation_is_scrolled_from_the_input(tui: Tui, script: Script) -> None:
    async with tui(size=(60, 16)) as chat:
        await chat.idle()
        for number in range(5):
            await chat.ask(f"message {number}")
        conversation = chat.app.chat.conversation
        await chat.until(lambda: "> message 4" in "\n".join(chat.lines))
        end = conversation.scroll_y
        await chat.press("pageup")
        await chat.until(lambda: conversation.scroll_y < end)
        await chat.press("pageup", "pageup")
        await chat.until(lambda: "> message 0" in "\n".join(chat.lines))
        await chat.press("pagedown", "pagedown", "pagedown")
        await chat.until(lambda: conversation.scroll_y == conversation.max_scroll_y)
        await chat.ask("message 5")  # and it follows again
        await chat.until(lambda: "> message 5" in "\n".join(chat.lines))
