"""The promise of the product: a conversation that was closed goes on as if it never had been.

Same tokens, and the last logits equal bit for bit, wherever the history ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from forked import call
from turns import run_turns, run_turns_in_process

TEXTS = (
    "Hello! What is your name?",
    "Tell me about the sea, please.",
    "日本語で挨拶してください 🙂",
    "Now say it shorter.",
    "Thanks. And what did I ask first?",
)


@pytest.fixture(scope="module")
def prepared_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models are prepared for all homes of these tests: it takes seconds each time."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def fresh_home(
    home: Path, prepared_models: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """Move to another home without KV: else the second run of a conversation would find the blocks
    of the first, which is right, and compute other pieces, which may round differently."""

    def move(name: str) -> None:
        cache = home / name / "cache"
        cache.mkdir(mode=0o700, parents=True)
        (cache / "models").symlink_to(prepared_models)
        monkeypatch.setenv("CHATKV_HOME", str(home / name))

    return move


def same(one: list[dict], other: list[dict]) -> None:
    assert [turn["reply_ids"] for turn in one] == [turn["reply_ids"] for turn in other]
    assert [turn["logits"] for turn in one] == [turn["logits"] for turn in other]
    assert [turn["text"] for turn in one] == [turn["text"] for turn in other]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "sampled"])
def test_five_turns_in_five_processes_equal_one_process(
    temperature: float, fresh_home: Callable[[str], None], smollm2_gguf: Path, native_dtype: str
) -> None:
    turns = hold_five_turns(
        run_turns_in_process, fresh_home, str(smollm2_gguf), temperature, dtype=native_dtype
    )
    assert [turn["notices"] for turn in turns] == [[]] * len(TEXTS)


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "sampled"])
def test_five_turns_in_five_processes_equal_one_process_tiny(
    temperature: float, fresh_home: Callable[[str], None], tiny_checkpoint: Callable[..., Path]
) -> None:
    def in_process(texts: Sequence[str], **options: Any) -> list[dict[str, Any]]:
        return call(run_turns, texts, **options)

    hold_five_turns(
        in_process, fresh_home, str(tiny_checkpoint("llama3")), temperature, dtype="float32"
    )


def hold_five_turns(
    in_process: Callable[..., list[dict[str, Any]]],
    fresh_home: Callable[[str], None],
    model: str,
    temperature: float,
    **options: Any,
) -> list[dict[str, Any]]:
    """The turns in processes of their own."""
    options |= {"model": model, "temperature": temperature, "max_tokens": 24, "restore": "reload"}
    fresh_home("together")
    together = in_process(TEXTS, **options)
    fresh_home("apart")
    session = None
    apart: list[dict[str, Any]] = []
    for text in TEXTS:
        apart += in_process([text], session=session, **options)
        session = apart[-1]["session"]
    same(together, apart)
    assert apart[0]["session"] != together[0]["session"]
    for before, turn in itertools.pairwise(apart):
        # Everything that was ever computed came from disk: all but the token sampled last.
        assert turn["tokens"]["loaded"] == len(before["log"]) - 1
        assert turn["tokens"]["reused"] == 0
        assert turn["plan"]["chosen"] == "reload"
    for turn in together[1:]:
        assert turn["tokens"]["loaded"] == 0
        assert turn["plan"]["chosen"] == "none"
    for turn in together + apart:
        tokens = turn["tokens"]
        assert tokens["prompt"] == tokens["reused"] + tokens["loaded"] + tokens["computed"]
    return apart


def resume_at(
    length: int,
    model: str,
    fresh_home: Callable[[str], None],
    most_tokens: int,
    **options: object,
) -> None:
    """Compare at a history of exactly `length` tokens, most_tokens at most."""
    prompt, seed = probed(fresh_home, model, most_tokens, **options)
    assert prompt < length
    options |= {"model": model, "max_tokens": length - prompt, "restore": "reload"}
    fresh_home("apart")
    first = run_turns(["Count to ten."], seed=seed, **options)
    assert len(first[0]["log"]) == length
    second = run_turns(["Go on."], session=first[0]["session"], seed=seed, **options)
    fresh_home("together")
    together = run_turns(["Count to ten.", "Go on."], seed=seed, **options)
    same(together, first + second)
    assert second[0]["tokens"]["loaded"] == length - 1


PROBED: dict[tuple[object, ...], tuple[int, int]] = {}


def probed(
    fresh_home: Callable[[str], None], model: str, most_tokens: int, **options: object
) -> tuple[int, int]:
    """Tokens of the prompt, and the first seed whose reply does not stop within so many tokens."""
    asked = model, most_tokens, *sorted(options.items())
    if asked in PROBED:
        return PROBED[asked]
    for seed in range(20):
        fresh_home(f"probe-{seed}")
        (turn,) = run_turns(
            ["Count to ten."], model=model, seed=seed, max_tokens=most_tokens, **options
        )
        if turn["finish_reason"] == "length":
            PROBED[asked] = turn["tokens"]["prompt"], seed
            return PROBED[asked]
    pytest.fail("every reply stops early")


@pytest.mark.parametrize(
    ("dtype", "length"),
    [
        *(("float32", length) for length in (63, 64, 65, 66, 127, 128, 129, 130)),
        *(("bfloat16", length) for length in (63, 64, 65)),
        *(
            pytest.param("bfloat16", length, marks=pytest.mark.slow)
            for length in (66, 127, 128, 129, 130)
        ),
    ],
)
def test_every_side_of_a_block_border_tiny(
    dtype: str,
    length: int,
    fresh_home: Callable[[str], None],
    tiny_checkpoint: Callable[..., Path],
) -> None:
    resume_at(length, str(tiny_checkpoint("llama3")), fresh_home, 130, dtype=dtype, temperature=1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "length", [border + side for border in (64, 128, 192, 256) for side in (-1, 0, 1, 2)]
)
def test_every_side_of_a_block_border_smollm2(
    length: int, fresh_home: Callable[[str], None], smollm2_gguf: Path, native_dtype: str
) -> None:
    resume_at(length, str(smollm2_gguf), fresh_home, 258, temperature=0.8, dtype=native_dtype)


def test_a_new_session_shares_the_system_prompt_of_another(
    home: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    model = str(tiny_checkpoint("smollm"))
    system = "You are a very patient teacher. " * 12
    first = run_turns(["Hello"], model=model, system=system, restore="reload")
    second = run_turns(["Hello"], model=model, system=system, restore="reload")
    other = run_turns(["Something else"], model=model, system=system, restore="reload")
    assert first[0]["tokens"]["loaded"] == 0
    assert second[0]["tokens"]["loaded"] == second[0]["tokens"]["prompt"] - 1
    assert other[0]["tokens"]["loaded"] >= 64
    assert first[0]["reply_ids"] == second[0]["reply_ids"]
