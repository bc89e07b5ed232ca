"""The real model, through a client that sends everything again, over a restart of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from served import served, user

QUESTIONS = ("Name three rivers of Europe.", "Which of them is the longest?", "Where does it end?")


def talk(url: str, name: str, messages: list[Any], questions: tuple[str, ...]) -> list[Any]:
    """Ask one question after another; what was measured of each answer. `messages` grow."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    measured: list[Any] = []
    for question in questions:
        messages.append(user(question))
        answer: Any = client.chat.completions.create(
            model=name, messages=messages, max_tokens=24, temperature=0
        )
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        measured.append(answer.timings)
    return measured


@pytest.mark.slow
def test_a_restart_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2_gguf: Path
) -> None:
    monkeypatch.delenv("CHATKV_ENGINE", raising=False)
    name, model = smollm2_gguf.stem, str(smollm2_gguf)
    whole: list[Any] = []
    cut: list[Any] = []
    monkeypatch.setenv("CHATKV_HOME", str(tmp_path / "whole"))
    with served(model) as url:
        talk(url, name, whole, QUESTIONS)
    monkeypatch.setenv("CHATKV_HOME", str(tmp_path / "cut"))
    with served(model) as url:
        talk(url, name, cut, QUESTIONS[:2])
    with served(model) as url:
        (third,) = talk(url, name, cut, QUESTIONS[2:])
    assert cut == whole
    assert third["hit"] == "chain" and third["loaded_n"] > 60
    assert third["prompt_n"] < 30 and third["cache_n"] > 3 * third["prompt_n"]
