"""The promise of the product: a conversation that was closed goes on as if it never had been.

Same tokens, and the last logits equal bit for bit, wherever the history ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    "temperature",
    [pytest.param(0.0, id="greedy"), pytest.param(0.9, id="sampled", marks=pytest.mark.slow)],
)
def test_five_turns_in_five_processes_equal_one_process(
    temperature: float, fresh_home: Callable[[str], None], smollm2_gguf: Path, native_dtype: str
) -> None:
    options = {"model": str(smollm2_gguf), "temperature": temperature, "max_tokens": 24}
    options |= {"restore": "reload", "dtype": native_dtype}
    fresh_home("together")
    together = run_turns_in_process(TEXTS, **options)
    fresh_home("apart")
    session = None
    apart = []
    for text in TEXTS:
        apart += run_turns_in_process([text], session=session, **options)
        session = apart[-1]["session"]
    same(together, apart)
    assert apart[0]["session"] != together[0]["session"]
    for before, turn in itertools.pairwise(apart):
        # Everything that was ever computed came from disk: all but the token sampled last.
        assert turn["tokens"]["loaded"] == len(before["log"]) - 1
        assert turn["tokens"]["reused"] == 0
        assert turn["plan"]["chosen"] == "reload"
        assert turn["notices"] == []
    for turn in together[1:]:
        assert turn["tokens"]["loaded"] == 0
        assert turn["plan"]["chosen"] == "none"
    for turn in together + apart:
        tokens = turn["tokens"]
        assert tokens["prompt"] == tokens["reused"] + tokens["loaded"] + tokens["computed"]


def resume_at(
    length: int, model: str, fresh_home: Callable[[str], None], **options: object
) -> None:
    """Compare at a history of exactly `length` tokens."""
    fresh_home("probe")
    probe = run_turns(["Count to ten."], model=model, max_tokens=1, **options)
    prompt = probe[0]["tokens"]["prompt"]
    assert prompt < length
    options |= {"model": model, "max_tokens": length - prompt, "restore": "reload"}
    # Whether a sampled reply stops early is up to the seed; take the first whose reply does not.
    for seed in range(20):
        fresh_home(f"apart-{seed}")
        first = run_turns(["Count to ten."], seed=seed, **options)
        if first[0]["finish_reason"] == "length":
            break
    assert len(first[0]["log"]) == length
    second = run_turns(["Go on."], session=first[0]["session"], seed=seed, **options)
    fresh_home("together")
    together = run_turns(["Count to ten.", "Go on."], seed=seed, **options)
    same(together, first + second)
    assert second[0]["tokens"]["loaded"] == length - 1


@pytest.mark.parametrize("length", [63, 64, 65, 66, 127, 128, 129, 130])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_side_of_a_block_border_tiny(
    length: int,
    dtype: str,
    fresh_home: Callable[[str], None],
    tiny_checkpoint: Callable[..., Path],
) -> None:
    resume_at(length, str(tiny_checkpoint("llama3")), fresh_home, dtype=dtype, temperature=1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "length", [border + side for border in (64, 128, 192, 256) for side in (-1, 0, 1, 2)]
)
def test_every_side_of_a_block_border_smollm2(
    length: int, fresh_home: Callable[[str], None], smollm2_gguf: Path, native_dtype: str
) -> None:
    resume_at(length, str(smollm2_gguf), fresh_home, temperature=0.8, dtype=native_dtype)


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
