"""Asking before something is deleted: totals first, then a question or `--yes`."""

from __future__ import annotations

import sys

import click

from chatkv.errors import UsageError


def ask_before(what: str, yes: bool) -> None:
    """Return where a person at a terminal agrees to `what` ("delete 3 blocks"), or `yes`.

    Exits with 1 where they do not; UsageError where nobody can be asked.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"not going to {what} without a terminal to ask at: add -y")
    if not click.confirm(f"{what[0].upper()}{what[1:]}?", err=True):
        raise SystemExit(1)
