"""kill -9 at any instant loses at most the last second of what was read, and never more.

Each round forks a session, lets a process answer in it, kills that process, and looks: the turn
before is whole, what was printed is there, and the next answer is what a machine that has never
stored any KV would say.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chatkv.engine.engine import Engine
from chatkv.engine.pool import BlockPool
from chatkv.engine.sequence import TokenSequence
from chatkv.model.catalog import find_model
from chatkv.model.decoder import Decoder
from chatkv.model.prepared import prepare
from chatkv.model.tokenizer import Tokenizer
from chatkv.model.weights import load_weights
from chatkv.paths import folders
from chatkv_store.blocks import BlockStore
from chatkv_store.conversations import Conversations
from killable import say_and_kill
from turns import run_turns

STORY = (
    "Here is a story. A fisherman lived by the sea with his wife and their old grey cat. Every "
    "morning he rowed out before the sun was up, and every evening he came back and told the cat "
    "what he had seen: whales, storms, ships with red sails. One day he came back and was silent. "
)


class Oracle:
    """The model without any cache: greedy tokens from token ids alone."""

    def __init__(self, model: str) -> None:
        prepared = prepare(find_model(model, folders().cache), "float32", folders().models)
        self.tokenizer = Tokenizer.from_prepared(prepared)
        decoder = Decoder(prepared.config, load_weights(prepared), max_position=2048)
        pool = BlockPool(prepared.config, 32, decoder.dtype, decoder.device)
        self.engine = Engine(decoder, pool)

    def logits(self, ids: list[int]) -> torch.Tensor:
        sequence = TokenSequence(list(ids))
        try:
            return self.engine.prefill(sequence)
        finally:
            self.engine.pool.release(sequence.run)

    def agrees(self, prompt: list[int], reply: list[int]) -> bool:
        """Whether each reply token is (within float32 rounding) the likeliest one."""
        for count, token in enumerate(reply):
            logits = self.logits(prompt + reply[:count])
            if logits.max() - logits[token] > 1e-3:
                return False
        return True


def moments(rng: random.Random, count: int) -> list[tuple[str, float]]:
    """When to kill: in loading, prefill and decode, around the commit, while KV is written."""
    kinds = [("start", 0.6), ("open", 0.25), ("open", 1.5), ("finish", 0.02), ("done", 0.05)]
    chosen = [kinds[index % len(kinds)] for index in range(count)]
    return [(when, rng.uniform(0.0, span)) for when, span in chosen]


def check_after_kill(
    home: Path, model: str, oracle: Oracle, before: list[Any], session: str, heard: Any
) -> str:
    with Conversations(folders().conversations) as conversations:
        conversations.recover()
        turns = conversations.chain(session)
        assert [turn.reply_ids for turn in turns[: len(before)]] == [
            turn.reply_ids for turn in before
        ]
        if len(turns) > len(before):
            turn = turns[len(before)]
            assert turn.state in ("done", "interrupted")
            shown = heard.text(until=heard.killed_at - 1.0)
            assert turn.reply_text.startswith(shown), "printed a second before the kill, and lost"
            decoded = oracle.tokenizer.decode(turn.reply_ids)
            assert decoded.startswith(turn.reply_text)
        else:
            assert "text" not in heard.events, "answered without having saved the question"
    options = {"model": model, "dtype": "float32", "max_tokens": 4, "restore": "reload"}
    answer = run_turns(["And then?"], session=session, **options)[0]
    prompt = answer["log"][: answer["tokens"]["prompt"]]
    assert oracle.agrees(prompt, answer["reply_ids"])
    return answer["plan"]["chosen"]


def kill_rounds(home: Path, model: str, count: int, max_tokens: int) -> None:
    rng = random.Random(20)
    options = {"model": model, "dtype": "float32", "max_tokens": max_tokens}
    first = run_turns([STORY + "Why?"], model=model, dtype="float32", max_tokens=12)[0]
    oracle = Oracle(model)
    plans = set()
    for when, delay_s in moments(rng, count):
        with Conversations(folders().conversations) as conversations:
            session = conversations.fork(first["session"]).id
            before = conversations.chain(session)
        heard = say_and_kill(home, session, STORY + "What next?", options, when, delay_s)
        assert heard.error is None
        plans.add(check_after_kill(home, model, oracle, before, session, heard))
    assert "reload" in plans  # some KV outlived its process, else nothing was tested
    with BlockStore(folders().kv) as store:
        assert store.verify() == []


def test_kill_at_ten_instants_tiny(home: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    kill_rounds(home, str(tiny_checkpoint("llama3")), count=10, max_tokens=100)


@pytest.mark.slow
def test_kill_at_fifty_instants_smollm2(home: Path, smollm2_gguf: Path) -> None:
    kill_rounds(home, str(smollm2_gguf), count=50, max_tokens=100)
