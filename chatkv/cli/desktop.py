"""`chatkv desktop`: the chat page in a window of its own, and an entry in the desktop's menu."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import webbrowser
from importlib import resources
from pathlib import Path

import click

from chatkv.errors import ChatkvError, UsageError
from chatkv.paths import folders

# Browsers that show a page without their own bars, as an application's window.
APP_BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "microsoft-edge",
    "microsoft-edge-stable",
    "brave-browser",
)
# A browser that cannot start says so at once.
_START_S = 1.5
_QUOTED = str.maketrans({char: f"\\{char}" for char in '"`$\\'})


@click.command()
@click.option("--port", default=11535, show_default=True, type=click.IntRange(0, 65535))
@click.option("-m", "--model", "models", multiple=True, help="Offer this model; may be repeated.")
@click.option("--install", is_flag=True, help="Add chatkv to the desktop's menu, and end.")
@click.option("--uninstall", is_flag=True, help="Take it away again, and end.")
def desktop(port: int, models: tuple[str, ...], install: bool, uninstall: bool) -> None:
    """Open the chat page in a window of its own.

    A server that is running is used, else one is started, which goes on until `chatkv stop`.
    Chromium, Chrome, Edge or Brave show the page as an application; without one of them, the
    default browser opens it.
    """
    if install and uninstall:
        raise UsageError("give either --install or --uninstall, not both")
    if install:
        return _install()
    if uninstall:
        return _uninstall()
    from chatkv.client import engine

    named = [word for model in models for word in ("--model", _found_from_anywhere(model))]
    url = engine.serving(folders(), ["--port", str(port), *named])
    click.echo(url)
    show(url)


def _found_from_anywhere(model: str) -> str:
    """The server lives in no folder of its own."""
    return str(Path(model).absolute()) if Path(model).exists() else model


class NoWindow(ChatkvError):
    """The page is served, and nothing here can show it."""


def show(url: str) -> None:
    """Open `url` in a window. Raises NoWindow."""
    if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        raise NoWindow(f"there is no display to open a window on; the page is at {url}")
    for name in APP_BROWSERS:
        program = shutil.which(name)
        if program is not None and _starts([program, f"--app={url}", "--class=chatkv"]):
            return
    if not webbrowser.open(url):
        raise NoWindow(f"no browser was found; the page is at {url}")


def _starts(command: list[str]) -> bool:
    """Run a program that outlives this one; False where it fails at once."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return process.wait(_START_S) == 0  # it has told a window that is open already
    except subprocess.TimeoutExpired:
        return True
    except OSError:
        return False


# --- the desktop's menu ---------------------------------------------------------------------------


def _data_home() -> Path:
    given = os.environ.get("XDG_DATA_HOME", "")
    return Path(given) if os.path.isabs(given) else Path.home() / ".local" / "share"


def _entry() -> Path:
    return _data_home() / "applications" / "chatkv.desktop"


def _icon() -> Path:
    return _data_home() / "icons" / "hicolor" / "scalable" / "apps" / "chatkv.svg"


def _install() -> None:
    icon = resources.files("chatkv.server").joinpath("static", "icon.svg").read_text("utf-8")
    for path, text in ((_icon(), icon), (_entry(), entry(_command()))):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    click.echo(f"chatkv: {_entry()} is in the desktop's menu now", err=True)


def _uninstall() -> None:
    found = [path for path in (_entry(), _icon()) if path.exists()]
    for path in found:
        path.unlink()
    said = f"removed {_entry()}" if found else "the desktop's menu does not have it"
    click.echo(f"chatkv: {said}", err=True)


def _command() -> list[str]:
    """What opens the page from anywhere, with the same folders."""
    home = os.environ.get("CHATKV_HOME")
    where = ["env", f"CHATKV_HOME={Path(home).expanduser().absolute()}"] if home else []
    return [*where, sys.executable, "-m", "chatkv", "desktop"]


def entry(command: list[str]) -> str:
    """The menu's entry, in the form of the Desktop Entry Specification."""
    words = " ".join(_quoted(word) for word in command)
    lines = [
        "[Desktop Entry]",
        "Type=Application",
        "Version=1.5",
        "Name=chatkv",
        "GenericName=Chat",
        "Comment=Chat with a language model; come back days later, go on at once",
        f"Exec={words}",
        f"Icon={_icon()}",
        "Terminal=false",
        "Categories=Utility;Chat;",
        "StartupWMClass=chatkv",
    ]
    return "\n".join(lines) + "\n"


def _quoted(word: str) -> str:
    """One argument of Exec: quoted, then escaped once more as every string of the file is."""
    if "\n" in word:
        raise UsageError(f"the path {word!r} cannot stand in a menu's entry")
    return '"' + word.translate(_QUOTED).replace("\\", "\\\\").replace("%", "%%") + '"'
