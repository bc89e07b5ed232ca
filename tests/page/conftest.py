"""A real browser, without a window, before a server that the tests of a file share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from browsing import Browsed, watched

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home for all tests of a file."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("page-home")
        patch.setenv("CHATKV_HOME", str(home))
        patch.delenv("CHATKV_ENGINE")
        yield home


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Debian's Chromium, one process for a file; nothing is downloaded."""
    api = pytest.importorskip("playwright.sync_api", reason="no playwright: see scripts/setup test")
    if CHROMIUM is None:
        message = "no chromium: apt-get install chromium"
        if os.environ.get("CI"):
            pytest.fail(message + " (a skip would hide that the page does not work)")
        pytest.skip(message)
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        yield browser
        browser.close()


@pytest.fixture
def browse(chromium: Any) -> Iterator[Callable[..., Browsed]]:
    """`browse(url, **context)` -> the page there, in a browser that nobody has used before.

    Whatever it asked of another server, whatever its policy forbade and any error fails the test.
    """
    opened: list[Browsed] = []

    def browse(url: str, **context: Any) -> Browsed:
        opened.append(watched(chromium, url, **context))
        return opened[-1]

    yield browse
    for one in opened:
        one.close()
