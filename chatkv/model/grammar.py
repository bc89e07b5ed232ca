"""Answers that must have a form: which tokens may come next, by a grammar.

llguidance keeps the state of the grammar and says what it allows; here it is told what the tokens
of a model stand for, and asked. A grammar is a text in the Lark syntax that llguidance reads:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from chatkv.errors import UsageError
from chatkv.model.one_line import one_line

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from chatkv.model.tokenizer import Tokenizer


class GrammarState:
    """Where in its grammar an answer is. One answer's, and one thread's at a time."""

    def __init__(self, tokenizer: Tokenizer, grammar: str, ids: Iterable[int] = ()) -> None:
        """Behind `ids`, the answer's tokens so far. Raises UsageError for a grammar that cannot be
        followed, and for ids that do not."""
        from llguidance import LLMatcher

        self._matcher = LLMatcher(_spelled(tokenizer), grammar, log_level=0)
        self._check()
        for id in ids:
            self.accept(id)

    def masked(self, logits: Tensor) -> Tensor:
        """Logits [vocab_size] with -inf for what must not come next. What ends an answer may come
        where the grammar is satisfied, and nothing else may where it can go no further."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        allowed = torch.zeros(logits.shape[-1], dtype=torch.bool)
        spelled = torch.from_numpy(np.unpackbits(bits, bitorder="little").astype(bool))
        size = min(len(allowed), len(spelled))
        allowed[:size] = spelled[:size]
        return logits.masked_fill(~allowed.to(logits.device), -torch.inf)

    def accept(self, id: int) -> None:
        """The answer goes on with `id`."""
        self._matcher.consume_token(id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            why = one_line(self._matcher.get_error())
            raise UsageError(f"the answer cannot have the form that is asked for: {why}")


class _Spelling:
    """A tokenizer as llguidance asks it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokens = [tokenizer.bytes_of(id) for id in range(tokenizer.num_ids)]
        self.special_token_ids = sorted(tokenizer.special_ids.values())
        self.eos_token_id, self.bos_token_id = min(tokenizer.stop_ids), None
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """Ids of what the grammar leaves no choice about, in the middle of an answer."""
        return self._tokenizer.encode_continuation(text, ((0, len(text)),))


_KNOWN: WeakKeyDictionary[Tokenizer, LLTokenizer] = WeakKeyDictionary()
_LOCK = threading.Lock()


def _spelled(tokenizer: Tokenizer) -> LLTokenizer:
    """What the tokens of a model stand for, in llguidance's form; made once. UsageError for a model
    that has no token to end an answer with."""
    from llguidance import LLTokenizer, TokenizerWrapper

    if not tokenizer.stop_ids:
        raise UsageError("this model has no token that ends an answer, so no form can be asked for")
    with _LOCK:
        if tokenizer not in _KNOWN:
            wrapped = TokenizerWrapper(_Spelling(tokenizer))
            _KNOWN[tokenizer] = LLTokenizer(wrapped, eos_token=sorted(tokenizer.stop_ids))
        return _KNOWN[tokenizer]
