"""Every command, and every key of the input and the program."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from textual.command import CommandPalette
from textual.events import Paste
from textual.widgets import OptionList

from asynchronous import asynchronous
from chatkv.client import ChatRequest
from chatkv.commands.slash import COMMANDS
from chatkv.errors import UsageError
from chatkv.tui.help_screen import HelpScreen
from chatkv.tui.keys import APP, COMPOSER, TURN
from chatkv.tui.panels import TimelinePanel
from chatkv.tui.session_screen import SessionScreen
from chatkv.tui.start import Left
from chatkv_store.conversations import Conversations
from scripted_chat import Script

Tui = Callable[..., AbstractAsyncContextManager[Any]]


@asynchronous
async def test_commands_about_a_conversation(
    tui: Tui, script: Script, store: Conversations, tmp_path: Any
) -> None:
    async with tui(
        explain=lambda session, turn: [f"why turn {turn}"],
        coverage=lambda session, opened: ["all of it is stored"],
        state=lambda found: [f"computing in process {found['pid']}"],
    ) as chat:
        await chat.idle()
        for command in ("/edit", "/fork", "/regen", "/undo", "/why", "/copy", "/save", "/continue"):
            await chat.enter(command)
            assert chat.notices[-1].startswith(
                (f"{command}: nothing was said", "there is no answer")
            )
            assert chat.turns == []
        await chat.enter("/nonsense")
        assert "no command /nonsense" in chat.notices[-1]
        assert chat.app.chat.composer.text == "/nonsense"  # to be mended
        chat.app.chat.composer.text = ""

        await chat.enter("/system")
        assert chat.notices[-1] == "there is no system prompt"
        await chat.enter("/system Be brief.")
        await chat.ask("hello")
        await chat.ask("more")
        assert [system for _, _, system in script.sent] == ["Be brief.", None]
        assert "system: Be brief." in "\n".join(chat.lines)
        await chat.enter("/system Be long.")
        assert "/new SYSTEM PROMPT" in chat.notices[-1]

        await chat.enter("/set temperature 0.25")
        assert "temperature 0.25 · " in chat.notices[-1]
        await chat.enter("/set temperature")
        await chat.enter("/set x 1")
        assert "no setting x" in chat.notices[-1]
        await chat.ask("again")
        assert script.sent[-1][1].sampling.temperature == 0.25

        await chat.enter("/why 2")
        assert "Turn 2" in chat.text("#timeline-text")
        assert "why turn 2" in chat.text("#timeline-text")
        await chat.enter("/cache")
        await chat.until(lambda: chat.notices[-1] == "all of it is stored")
        await chat.enter("/status")
        await chat.until(lambda: chat.notices[-1] == "computing in process 1")

        await chat.enter("/save")
        assert "# hello" in (tmp_path / "hello.md").read_text()
        await chat.enter("/save hello.md")
        assert "exists" in chat.notices[-1]
        await chat.enter(f"/save {tmp_path}/no/folder.md")
        assert "No such file" in chat.notices[-1]
        await chat.enter("/copy")
        await chat.until((tmp_path / "copied.txt").exists)
        await chat.enter("/copy that")
        assert "/copy code" in chat.notices[-1]


@asynchronous
async def test_commands_that_go_to_another_conversation(
    tui: Tui, script: Script, store: Conversations
) -> None:
    async with tui() as chat:
        await chat.idle()
        await chat.ask("hello")
        await chat.ask("more")
        first = chat.app.chat.facts.session
        await chat.enter("/fork 1")
        await chat.until(lambda: len(chat.turns) == 1)
        await chat.idle()
        fork = chat.app.chat.facts.session
        assert fork != first and store.get_session(fork).title == "hello (fork)"
        await chat.enter("/new Be kind.")
        await chat.until(lambda: chat.app.chat.facts and chat.app.chat.facts.session != fork)
        await chat.idle()
        assert chat.turns == []
        await chat.ask("third")
        assert script.sent[-1][2] == "Be kind."
        await chat.enter(f"/resume {first}")
        await chat.until(lambda: len(chat.turns) == 2)
        await chat.idle()
        await chat.enter("/resume nowhere")
        assert "nowhere" in chat.notices[-1] and len(chat.turns) == 2

        await chat.enter("/model")
        assert chat.notices[-1] == "model: Scripted-1B"
        await chat.enter("/model Other-2B")
        await chat.until(lambda: script.opened[-1].model == "Other-2B")
        assert script.opened[-1].resume == first
        await chat.idle()
        await chat.press("ctrl+n")
        await chat.until(lambda: chat.turns == [])
        await chat.idle()


@asynchronous
async def test_conversations_are_searched_previewed_warmed_and_opened(
    tui: Tui, script: Script, store: Conversations
) -> None:
    async with tui(size=(120, 30)) as chat:
        await chat.idle()
        await chat.press("f3")
        assert isinstance(chat.app.screen, SessionScreen)
        assert chat.app.screen.query_one(OptionList).option_count == 1
        await chat.press("escape")
        for text in ("about the sea", "about the hills"):
            await chat.ask(text)
            await chat.enter("/new")
            await chat.until(lambda: chat.turns == [])
            await chat.idle()
        await chat.enter("/resume")
        await chat.press("down")
        shown = "\n".join(chat.lines)
        assert "about the sea" in shown and "> about the hills" in shown  # listed, previewed
        await chat.press(*"sea")
        options = chat.app.screen.query_one(OptionList)
        await chat.until(lambda: options.option_count == 1)
        assert "> about the sea" in chat.text("#preview")
        sea = next(one.id for one in store.list_sessions() if one.title == "about the sea")
        await chat.until(lambda: sea in script.warmed)  # restored while it is looked at
        await chat.press("down", "up", "enter")
        await chat.until(lambda: chat.turns and chat.turns[0][0] == "about the sea")
        await chat.idle()
        await chat.press("f3", *"xyz")
        await chat.until(lambda: "nothing found" in "\n".join(chat.lines))
        await chat.press("enter", "escape")


@asynchronous
async def test_the_input_has_lines_history_and_completion(tui: Tui, script: Script) -> None:
    async with tui() as chat:
        await chat.idle()
        composer = chat.app.chat.composer
        await chat.type("one")
        for key in ("ctrl+j", "shift+enter", "alt+enter"):
            await chat.press(key, "x")
        await chat.press("backslash", "enter", "y")
        assert composer.text == "one\nx\nx\nx\ny"
        await chat.press("up", "z")  # within the text, not the history
        assert composer.text == "one\nx\nx\nxz\ny"
        await chat.press("enter")
        await chat.until(lambda: script.sent)
        await chat.idle()
        assert script.sent[0][0] == "one\nx\nx\nxz\ny" and composer.text == ""
        await chat.ask("//two")
        assert script.sent[1][0] == "/two"
        await chat.type("draft")
        await chat.press("up")
        assert composer.text == "//two"
        await chat.press("up")
        assert composer.text.startswith("one")
        await chat.press("down", "down")
        assert composer.text == "draft"
        composer.text = ""
        await chat.type("/re")
        assert "/resume" in chat.text("#suggestions") and "/regen" in chat.text("#suggestions")
        await chat.press("s", "tab")
        assert composer.text == "/resume "
        composer.text = ""
        await chat.type("/set temp")
        await chat.press("tab")
        assert composer.text == "/set temperature"
        await chat.type(" 0.5")
        assert not chat.app.chat.query_one("#suggestions").display
        composer.text = ""
        await chat.press("ctrl+d")
        await chat.until(lambda: chat.app.return_value is not None)


@asynchronous
async def test_large_pastes_are_folded(tui: Tui, script: Script) -> None:
    async with tui() as chat:
        await chat.idle()
        composer = chat.app.chat.composer
        text = "line of a log\r\n" * 70_000
        composer.post_message(Paste("see: "))
        composer.post_message(Paste(text))
        await chat.until(lambda: "[paste 1:" in composer.text)
        assert composer.text == "see: [paste 1: 957 KiB, 70,001 lines]"
        await chat.press("enter")
        await chat.until(lambda: script.sent)
        assert script.sent[0][0] == "see: " + text.replace("\r\n", "\n")
        await chat.idle()
        assert "characters in all]" in "\n".join(chat.lines)
        composer.post_message(Paste("a\n" * 30))
        await chat.until(lambda: composer.text)
        await chat.press("x", "backspace", "backspace")
        assert composer.text == ""  # the mark goes as one
        composer.post_message(Paste("a\n" * 30))
        await chat.until(lambda: composer.text)
        await chat.press("ctrl+o")
        assert composer.text == "a\n" * 30


@asynchronous
async def test_ctrl_c_twice_leaves_and_once_does_not(tui: Tui) -> None:
    async with tui() as chat:
        await chat.idle()
        await chat.ask("hello")
        session = chat.app.chat.facts.session
        await chat.type("half a message")
        await chat.press("ctrl+c")
        assert chat.app.chat.composer.text == "" and chat.app.return_value is None
        await chat.press("ctrl+c")
        assert chat.app.return_value == Left(session)


@pytest.mark.parametrize(
    ("keys", "left"),
    [
        (["ctrl+q"], Left()),
        (["/quit", "enter"], Left()),
        (["/plain", "enter"], Left(None, 0, True)),
    ],
)
@asynchronous
async def test_ways_to_leave(tui: Tui, keys: list[str], left: Left) -> None:
    async with tui() as chat:
        await chat.idle()
        *typed, last = keys
        await chat.type("".join(typed))
        await chat.press(last)
        assert chat.app.return_value == left


@asynchronous
async def test_help_timeline_palette_and_themes(tui: Tui) -> None:
    async with tui() as chat:
        await chat.idle()
        await chat.press("f1")
        assert isinstance(chat.app.screen, HelpScreen)
        await chat.press("escape")
        await chat.enter("/help")
        assert isinstance(chat.app.screen, HelpScreen)
        await chat.press("enter")
        panel = chat.app.chat.query_one(TimelinePanel)
        await chat.press("f2")
        assert panel.display and "No turn has been answered" in chat.text("#timeline-text")
        await chat.ask("hello")
        assert "11.0 MiB" in chat.text("#timeline-text")
        await chat.press("f2")
        assert not panel.display
        await chat.enter("/theme nord")
        assert chat.app.theme == "nord"
        await chat.enter("/theme plaid")
        assert "there is no theme plaid" in chat.notices[-1]
        await chat.enter("/theme")
        await chat.press("escape", "escape", "escape")
        chat.app.chat.composer.focus()
        await chat.press("ctrl+p")
        assert isinstance(chat.app.screen, CommandPalette)
        offered = {one.title for one in chat.app.get_system_commands(chat.app.screen)}
        assert {f"/{name}" for name in COMMANDS} <= offered
        await chat.press(*"/undo")
        found = chat.app.screen.query_one(OptionList)
        await chat.until(lambda: found.option_count == 1 and found.highlighted == 0)
        await chat.press("enter")
        await chat.until(lambda: chat.turns == [])


@asynchronous
async def test_keys_can_be_changed(tui: Tui, script: Script) -> None:
    keymap = {"send": "ctrl+s", "newline": "enter", "timeline": "f9"}
    async with tui(keymap=keymap) as chat:
        await chat.idle()
        await chat.type("one")
        await chat.press("enter", "x", "ctrl+s")
        await chat.until(lambda: script.sent)
        assert script.sent[0][0] == "one\nx"
        await chat.idle()
        await chat.press("f2")
        assert not chat.app.chat.query_one(TimelinePanel).display
        await chat.press("f9")
        assert chat.app.chat.query_one(TimelinePanel).display
    with pytest.raises(UsageError, match="no key named nothing"):
        async with tui(keymap={"nothing": "f1"}):
            pass


def test_every_key_has_a_name_of_its_own_and_no_two_are_alike() -> None:
    names = [key.name for key in (*APP, *COMPOSER, *TURN)]
    assert len(names) == len(set(names))
    for group in (APP + COMPOSER, TURN):
        keys = [one for key in group for one in key.keys.split(",")]
        assert len(keys) == len(set(keys))


@asynchronous
async def test_a_request_for_a_model_is_passed_on(tui: Tui, script: Script) -> None:
    async with tui(ChatRequest(model="Other-2B", system="Be.")) as chat:
        await chat.idle()
        assert script.opened == [ChatRequest(model="Other-2B", system="Be.")]
        await chat.ask("hello")
        assert script.sent[0][2] == "Be."
