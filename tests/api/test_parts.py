"""An answer taken apart, however its text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkv.server.parts import Parts, said_in, written

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("answer", "content", "reasoning", "num_calls"),
    [
        ("plain", "plain", "", 0),
        ("<think>hm</think>yes", "yes", "hm", 0),
        ("  <think>hm</think>\n\nyes", "  \n\nyes", "hm", 0),
        ("hm</think>yes", "yes", "hm", 0),
        ("<think>never ends", "", "never ends", 0),
        ("no <think>x</think>", "no <think>x</think>", "", 0),
        ("1 < 2 <thin", "1 < 2 <thin", "", 0),
        ("<thin", "<thin", "", 0),
        (f"I look.{CALL}", "I look.", "", 1),
        (f"{CALL}\n{CALL}", "\n", "", 2),
        ("<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", "", 0),
        ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', "", 0),
        ("<tool_call>never ends", "<tool_call>never ends", "", 0),
        (f"<think>a <tool_call> b</think>{CALL}", "", "a <tool_call> b", 1),
    ],
)
def test_what_is_in_an_answer(answer: str, content: str, reasoning: str, num_calls: int) -> None:
    said = said_in(answer, has_tools=True)
    assert (said.content, said.reasoning, len(said.calls)) == (content, reasoning, num_calls)
    for call in said.calls:
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Bonn"}


@given(
    st.lists(st.sampled_from(["<think>", "</think>", CALL, "<tool_call>", "text ", "<", "é"])),
    st.data(),
)
def test_however_it_is_cut(pieces: list[str], data: Any) -> None:
    answer = "".join(pieces)
    whole, cut = Parts(has_tools=True), Parts(has_tools=True)
    wanted = _joined([*whole.push(answer), *whole.flush()])
    found: list[tuple[str, str]] = []
    left = answer
    while left:
        size = data.draw(st.integers(1, len(left)))
        found += cut.push(left[:size])
        left = left[size:]
    assert _joined([*found, *cut.flush()]) == wanted


def _joined(found: list[Any]) -> list[Any]:
    """Neighbours of one kind as one; each call is its own."""
    joined: list[Any] = []
    for kind, text in found:
        if joined and joined[-1][0] == kind != "call":
            joined[-1] = (kind, joined[-1][1] + text)
        else:
            joined.append((kind, text))
    return joined


def test_a_call_is_written_as_it_is_read() -> None:
    said = said_in(f"I look.\n{CALL}", has_tools=True)
    call = dict(said.calls[0])
    call["function"] = {"name": "weather", "arguments": {"city": "Bonn"}}
    again = said_in(written({"content": said.content.strip(), "tool_calls": [call]}), True)
    assert again.calls == said.calls and again.content.strip() == "I look."
