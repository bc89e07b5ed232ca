"""How answers are made, as /set shows and changes it."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from chatkv.engine.options import SamplingOptions, Speculate
from chatkv.errors import UsageError
from chatkv.session.turn import TurnOptions

_SAMPLING = {"temperature": float, "top-p": float, "top-k": int, "min-p": float}
_RESTORE = ("auto", "reload", "re-prefill", "both", "remote")
_OVERFLOW = ("refuse", "shift", "recompute")
NAMES = (*_SAMPLING, "max-tokens", "seed", "restore", "exact", "overflow", "speculate")


def shown(options: TurnOptions) -> str:
    """Every setting with its value, in one line."""
    sampling = {name: getattr(options.sampling, name.replace("-", "_")) for name in _SAMPLING}
    rest = {
        "max-tokens": options.max_tokens,
        "seed": "the session's" if options.seed is None else options.seed,
        "restore": options.restore,
        "exact": "yes" if options.exact else "no",
        "overflow": options.overflow,
        "speculate": options.speculate,
    }
    return " · ".join(f"{name} {value}" for name, value in (sampling | rest).items())


def changed(options: TurnOptions, name: str, value: str) -> TurnOptions:
    """`options` with one setting changed. Raises UsageError."""
    name = name.lower().replace("_", "-")
    try:
        if name in _SAMPLING:
            number = _SAMPLING[name](value)
            sampling: SamplingOptions = replace(
                options.sampling, **{name.replace("-", "_"): number}
            )
            return replace(options, sampling=sampling)
        if name == "max-tokens" and int(value) >= 1:
            return replace(options, max_tokens=int(value))
        if name == "seed" and 0 <= int(value) < 2**64:
            return replace(options, seed=int(value))
    except ValueError:
        raise UsageError(f"/set {name}: {value} is no number") from None
    if name == "restore" and value in _RESTORE:
        return replace(options, restore=value)  # type: ignore[arg-type]  # one of Wanted
    if name == "overflow" and value in _OVERFLOW:
        return replace(options, overflow=value)  # type: ignore[arg-type]  # one of Overflow
    if name == "speculate" and value in get_args(Speculate):
        return replace(options, speculate=value)  # type: ignore[arg-type]  # one of Speculate
    if name == "exact" and value in ("yes", "no"):
        return replace(options, exact=value == "yes")
    if name in NAMES:
        raise UsageError(f"/set {name} {value} makes no sense here")
    raise UsageError(f"there is no setting {name}: there are {', '.join(NAMES)}")
