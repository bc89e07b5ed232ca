"""Every error a user can cause, as one tree.

    ChatkvError                 one line: what, where, what to do; the program prints it and exits
    ├── UsageError              an argument that makes no sense            exit code 2
    ├── ModelError              a model that cannot be found or understood
    ├── ContextFull             the conversation does not fit the model's context
    └── PersistenceError        the disk tier refuses (mapped from chatkv_store.StoreError)

The store raises its own `StoreError` tree, because it imports nothing of chatkv; the session
manager and the faces catch both.
"""

from __future__ import annotations


class ChatkvError(Exception):
    """Base of all errors shown to a user; `str()` is one clear line."""

    exit_code = 1


class UsageError(ChatkvError):
    """An argument or option that makes no sense."""

    exit_code = 2


class ModelError(ChatkvError):
    """A model that cannot be found, read or understood."""


class ContextFull(ChatkvError):
    """The conversation and its new prompt do not fit into the model's context."""


class PersistenceError(ChatkvError):
    """The disk tier cannot do what a turn needs."""
