"""Turns with drafts: the same conversations, faster; what is told of them; and over a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from chatkv.cli.why import explain
from chatkv.server.metrics import Metrics
from chatkv.session.turn import TurnResult
from chatkv.tui.status import Status
from drafted import TEXTS, Held, held


@pytest.fixture
def model(home: Path, tiny_checkpoint: Callable[..., Path]) -> str:
    return str(tiny_checkpoint("llama3"))


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_answers_are_those_of_plain_turns(model: str, temperature: float) -> None:
    plain = held(model, speculate="off", temperature=temperature)
    drafted = held(model, temperature=temperature)
    assert [ids for _, ids in drafted] == [ids for _, ids in plain]
    assert [result.text for result, _ in drafted] == [result.text for result, _ in plain]
    for result, ids in plain:
        told = result.to_json()["speculation"]
        assert told == {"source": "off", "drafted": 0, "accepted": 0, "steps": len(ids) - 1}
    for result, ids in drafted:
        counts = result.speculation
        assert counts.source == "ngram"
        assert 0 <= len(ids) - 1 - counts.steps <= counts.accepted <= counts.drafted
    assert temperature or sum(result.speculation.accepted for result, _ in drafted) > 20


def test_a_stop_string_inside_an_accepted_run_ends_the_answer(model: str) -> None:
    whole = held(model, TEXTS[:1])[0][0]
    assert whole.speculation.accepted
    for at in (10, 25, 40):
        stop = whole.text[at : at + 3]
        results = [
            held(model, TEXTS[:1], stop=(stop,), speculate=speculate)[0]
            for speculate in ("off", "ngram")
        ]
        assert results[0][1] == results[1][1]
        assert results[0][0].text == results[1][0].text == whole.text[: whole.text.index(stop)]
        assert results[1][0].finish_reason == "stop"


def test_exact_turns_draft_only_where_they_are_told_to(model: str) -> None:
    assert held(model, exact=True)[0][0].speculation.source == "off"
    assert held(model, exact=True, speculate="ngram")[0][0].speculation.source == "ngram"


@pytest.mark.parametrize("temperature", [0.0, 0.4])
def test_a_restart_changes_neither_answers_nor_what_is_accepted(
    model: str, temperature: float
) -> None:
    """Drafts look into the log, which is there again at once: also in earlier turns."""
    together = held(model, temperature=temperature)
    apart: Held = []
    session = None
    for text in TEXTS:
        apart += held(model, (text,), session, temperature=temperature)
        session = apart[-1][0].session
    assert [ids for _, ids in apart] == [ids for _, ids in together]
    assert [result.speculation for result, _ in apart] == [
        result.speculation for result, _ in together
    ]
    assert apart[-1][0].tokens.loaded > 0


def test_what_came_of_drafts_is_told_everywhere(model: str) -> None:
    result = held(model, TEXTS[:1])[0][0]
    counts = result.speculation
    assert TurnResult.from_json(result.to_json()).speculation == counts
    said = " ".join(explain(result.to_json(), 0))
    assert f"Of {counts.drafted} tokens guessed ahead (ngram), {counts.accepted} were right" in said
    share = 100 * counts.accepted // counts.drafted
    assert f"{share}% of guesses right" in Status(stats=result.to_json()).line(500)
    assert "guess" not in Status(stats={"tokens": {}}).line(500)
    metrics = Metrics()
    metrics.drafted["ngram", "accepted"] += 2
    text = metrics.text({"models": [], "open_sessions": [], "answering": []}, {})
    assert 'chatkv_drafted_tokens_total{source="ngram",outcome="accepted"} 2' in text


@pytest.mark.slow
def test_the_real_model_says_the_same(home: Path, smollm2_gguf: Path) -> None:
    """A token alone attends by another routine than one with a draft, and rounds differently: where
    two tokens are as likely as that, either may come."""
    names = "alder ash beech birch cedar elm fir hazel larch lime maple oak pine poplar rowan yew"
    text = "Output the following list again, unchanged:\n\n- " + names.replace(" ", "\n- ")
    plain = held(str(smollm2_gguf), (text, "Once more."), speculate="off")
    drafted = held(str(smollm2_gguf), (text, "Once more."), speculate="ngram")
    assert [ids for _, ids in drafted] == [ids for _, ids in plain]
    assert sum(result.speculation.accepted for result, _ in drafted) > 15
