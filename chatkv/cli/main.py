"""The program: its commands by name, imported when they are called, and how errors end.

exit code 0    done
          1    it could not be done, a check found something, or nobody reads the output any more
          2    used in a way that makes no sense
          130  interrupted by Ctrl-C
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import click

from chatkv import __version__
from chatkv.cli.lazy import LazyGroup
from chatkv.errors import ChatkvError

# name -> (where it is, what it does). Help and completion of names need no import of these.
COMMANDS = {
    "chat": ("chatkv.cli.chat:chat", "Chat with a model."),
    "resume": ("chatkv.cli.chat:resume", "Go on with a conversation."),
    "ask": ("chatkv.cli.ask:ask", "Ask one question and print the answer."),
    "serve": ("chatkv.cli.serve:serve", "Be the engine that all of chatkv talks to."),
    "desktop": ("chatkv.cli.desktop:desktop", "Open the chat page in a window of its own."),
    "status": ("chatkv.cli.serve:status", "Show what the engine has loaded and is doing."),
    "stop": ("chatkv.cli.serve:stop", "End the engine, once all is saved."),
    "sessions": ("chatkv.cli.sessions:sessions", "List, search, read, delete and fork."),
    "codec": ("chatkv.cli.codec:codec", "Measure what KV codecs save and what they cost."),
    "why": ("chatkv.cli.why:why", "Explain where a turn's KV came from and what it took."),
    "calibrate": ("chatkv.cli.calibrate:calibrate", "Measure what loading and computing cost."),
    "encrypt": ("chatkv.cli.encrypt:encrypt", "Keep the KV cache encrypted, or no longer."),
    "cache": ("chatkv.cli.cache:cache", "Look into the KV cache and check it."),
    "models": ("chatkv.cli.models:models", "List, show, download and remove models."),
    "config": ("chatkv.cli.config:config", "Show and change settings."),
    "doctor": ("chatkv.cli.doctor:doctor", "Check what chatkv stands on, and say what to do."),
    "completion": ("chatkv.cli.completion:completion", "Print a shell's completion script."),
}

# What has to work where a setting makes no sense, or needs none.
WITHOUT_SETTINGS = {"config", "doctor", "completion", "status", "stop"}


@click.group(
    cls=LazyGroup,
    commands_at=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="chatkv", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Chat with a language model; close it, come back days later, go on at once."""
    if context.invoked_subcommand not in WITHOUT_SETTINGS:
        _take_settings(context)


def _take_settings(context: click.Context) -> None:
    """Make what the file and the environment say the defaults of the command that is called."""
    from chatkv.paths import folders

    path = folders().settings
    variables = (name for name in os.environ if name.startswith("CHATKV_"))
    if not path.exists() and all(name == "CHATKV_HOME" for name in variables):
        return  # sooner than to find it out from what is not there
    from chatkv.settings.read import carry, defaults, read

    values = read(path, os.environ)
    carry(values, os.environ)
    context.obj, context.default_map = values, defaults(values)


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of the program; exits."""
    _open_missing_streams()
    os.umask(0o077)  # whatever is written, also by libraries, is its owner's alone
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a Latin-1 terminal shows ? for the rest
    if "_CHATKV_COMPLETE" in os.environ:  # a shell asks, on whose line nothing else may appear
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    code = run(arguments)
    with suppress(ValueError):  # not on the main thread: its signals are its caller's
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done, and is not to look undone
    if any(thread.daemon for thread in threading.enumerate()):
        _leave(code)
    raise SystemExit(code)


def _leave(code: int) -> None:
    """End here, beside threads that nobody waits for: one that is still loading a model would make
    libtorch abort the process when its own statics are taken down."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _open_missing_streams() -> None:
    """Let nothing be where a shell's `>&-` closed a standard stream.

    Python has None there, which cannot be written to. Worse, the next file to be opened would get
    the stream's number: a store, into which some library would then print its warnings.
    """
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(spare)
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. Every expected failure is one line on stderr."""
    try:
        code: Any = cli.main(arguments, prog_name="chatkv", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):  # click has ended the line on which ^C stands
        return 130
    except BrokenPipeError:
        # The interpreter flushes stdout once more at its end, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ChatkvError as error:
        return _fail(error, error.exit_code)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", 1)
    except Exception as error:
        if not _is_store_error(error):
            raise
        return _fail(error, 1)


def _fail(error: object, exit_code: int) -> int:
    click.echo(f"chatkv: {' '.join(str(error).split())}", err=True)
    return exit_code


def _is_store_error(error: Exception) -> bool:
    """Without importing the store for commands that never touched it."""
    errors = sys.modules.get("chatkv_store.errors")
    return errors is not None and isinstance(error, errors.StoreError)
