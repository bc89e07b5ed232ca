"""What `ask` and `chat` share: options, an answer as it streams, Ctrl-C, the line after a turn."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from chatkv.cli.complete import complete_session
from chatkv.cli.device import device_option
from chatkv.cli.options import setting_option, values_in_force
from chatkv.cli.output import printable
from chatkv.client import ChatRequest

if TYPE_CHECKING:
    from types import FrameType

    from chatkv.engine.options import SamplingOptions
    from chatkv.session.turn import TurnOptions, TurnResult

Command = TypeVar("Command", bound=Callable[..., Any])


def chat_options(command: Command) -> Command:
    """The options of everything that talks to a model."""
    options = [
        click.option(
            "-c", "--continue", "resume_last", is_flag=True, help="Go on with the last session."
        ),
        click.option(
            "-r",
            "--resume",
            metavar="SESSION",
            shell_complete=complete_session,
            help="Go on with a session: its id, the start of it (4+), or its title.",
        ),
        setting_option("model", "-m", is_remembered=True),
        setting_option("system"),
        setting_option("max-tokens"),
        setting_option("temperature"),
        setting_option("top-p"),
        setting_option("top-k"),
        setting_option("min-p"),
        click.option(
            "--seed", type=click.IntRange(min=0, max=2**64 - 1), help="Make sampling repeatable."
        ),
        click.option(
            "--stop",
            multiple=True,
            metavar="TEXT",
            help="End the answer before this text; can be given again.",
        ),
        setting_option("dtype", is_remembered=True),
        setting_option("weights", is_remembered=True),
        device_option,
        setting_option("kv-codec", is_remembered=True),
        setting_option("restore"),
        setting_option("overflow"),
        setting_option("speculate"),
        setting_option("exact"),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def chat_request(arguments: dict[str, Any]) -> ChatRequest:
    """The options of `chat_options` that say what is talked to. A conversation goes on with what
    it remembers; what the settings say of that begins new ones."""
    names = ("model", "dtype", "weights", "resume", "resume_last", "system", "seed", "kv_codec")
    request = ChatRequest(**{name: arguments[name] for name in names})
    if request.resume is not None or request.resume_last:
        return request
    return new_request(arguments)


def new_request(arguments: dict[str, Any]) -> ChatRequest:
    """What a conversation begins with that is not `--resume`d: options above settings."""
    found = {
        value.setting.parameter: value.value
        for value in values_in_force().values()
        if value.setting.is_remembered and value.source != "default"
    }
    names = ("model", "dtype", "weights", "system", "kv_codec")
    given = {name: arguments[name] for name in names if arguments[name] is not None}
    return ChatRequest(**found | given, seed=arguments["seed"])


def sampling_options(arguments: dict[str, Any]) -> SamplingOptions:
    """The options of `chat_options` that say how tokens are drawn. Raises UsageError."""
    from chatkv.engine.options import SamplingOptions

    names = ("temperature", "top_p", "top_k", "min_p")
    return SamplingOptions(**{name: arguments[name] for name in names})


def turn_options(arguments: dict[str, Any]) -> TurnOptions:
    """The options of `chat_options` that concern one turn."""
    from chatkv.session.turn import TurnOptions

    return TurnOptions(
        sampling_options(arguments),
        max_tokens=arguments["max_tokens"],
        stop=tuple(arguments["stop"]),
        seed=arguments["seed"],
        restore=arguments["restore"],
        exact=arguments["exact"],
        overflow=arguments["overflow"],
        speculate=arguments["speculate"],
    )


class Interrupt:
    """Ctrl-C while an answer is made: the first stops the answer, the second the program."""

    def __init__(self) -> None:
        self.requested = self.was_second = False

    def __call__(self) -> bool:
        return self.requested

    @contextmanager
    def listening(self) -> Iterator[Interrupt]:
        def handle(signum: int, frame: FrameType | None) -> None:
            if self.requested:
                self.was_second = True
                raise KeyboardInterrupt
            self.requested = True

        self.requested = False
        before = signal.signal(signal.SIGINT, handle)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)


class Status:
    """One line on stderr that says what is being waited for; silent where nobody looks."""

    def __init__(self) -> None:
        self._shown = ""
        self._is_live = sys.stderr.isatty()

    def progress(self, stage: str, done: int, total: int) -> None:
        """ "stage 42%"; a stage that is done disappears."""
        share = f" {100 * done // total}%" if total > 1 else ""
        self.show("" if done >= total else f"{stage}{share}")

    def show(self, text: str) -> None:
        if self._is_live and text != self._shown:
            # Overwritten with spaces: not every terminal knows an erase sequence.
            sys.stderr.write("\r" + text + " " * (len(self._shown) - len(text)))
            sys.stderr.write("\r" if not text else "")
            sys.stderr.flush()
            self._shown = text

    def clear(self) -> None:
        self.show("")


def shown(text: str) -> str:
    """What is written to stdout of a model's text: a terminal gets no control characters, with
    which a model could move its cursor or rename its window; a pipe gets every byte."""
    return printable(text) if sys.stdout.isatty() else text


def say(line: str) -> None:
    """A line for the user beside the answer."""
    click.echo(line, err=True)


def summary(result: TurnResult) -> str:
    """What the turn took, in one line."""
    tokens, timing = result.tokens, result.timing
    parts = [f"session {result.session[:10]}", f"turn {result.turn}"]
    kept = []
    if tokens.reused:
        kept.append(f"{tokens.reused} reused")
    if tokens.loaded:
        kept.append(f"{tokens.loaded} from disk in {timing.restore_ms:.0f} ms")
    if tokens.remote and result.remote is not None:
        kept.append(f"{tokens.remote} from the prefill worker in {result.remote['ms']:.0f} ms")
    kept.append(f"{tokens.computed} computed in {timing.prefill_ms:.0f} ms")
    parts.append("tokens: " + ", ".join(kept))
    if timing.decode_tokens_per_s is not None:
        parts.append(f"{tokens.generated} answered at {timing.decode_tokens_per_s:.0f}/s")
    if result.finish_reason != "stop":
        parts.append("stopped" if result.finish_reason == "interrupted" else "cut at --max-tokens")
    return " · ".join(parts)
