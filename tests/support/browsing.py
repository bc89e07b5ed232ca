"""The chat page in a browser, as its user does things to it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

# Answers of the tiny model are noise: short and the same each time.
SETTINGS = {"system": "", "temperature": 0, "maxTokens": 16, "overflow": "refuse"}
_WATCH = """
document.addEventListener("securitypolicyviolation", (event) =>
  console.error(`policy: ${event.violatedDirective} ${event.blockedURI}`));
"""
TIMEOUT_MS = 60_000  # also on a machine that is busy


@dataclass
class Browsed:
    """One page; `wrong` is what must not happen."""

    page: Any
    url: str
    wrong: list[str] = field(default_factory=list)

    def open(self, session: str = "") -> None:
        self.page.goto(f"{self.url}/#{session}" if session else self.url)
        self.page.wait_for_selector("#model option", state="attached")

    def close(self) -> None:
        self.page.context.close()
        assert self.wrong == []

    # --- what a user does ------------------------------------------------------------------------

    def write(self, text: str) -> None:
        """Type it and press Enter; the answer may go on."""
        box = self.page.locator("#composer-text")
        box.fill(text)
        box.press("Enter")

    def say(self, text: str) -> str:
        """Type it and wait for the whole answer: its text."""
        self.write(text)
        self.wait_for_answer(text)
        return self.answer

    def wait_for_answer(self, text: str | None = None) -> None:
        if text is not None:
            self.page.locator(".said", has_text=text).last.wait_for()
        self.page.locator(".turn").last.locator(".measured").wait_for()
        self.page.wait_for_selector("#send", state="visible")

    def press(self, key: str) -> None:
        self.page.keyboard.press(key)

    # --- what a user sees ------------------------------------------------------------------------

    @property
    def said(self) -> list[str]:
        return [text.strip() for text in self.page.locator(".said p").all_inner_texts()]

    @property
    def answers(self) -> list[str]:
        return [text.strip() for text in self.page.locator(".turn .markdown").all_inner_texts()]

    @property
    def answer(self) -> str:
        return self.answers[-1]

    @property
    def measured(self) -> str:
        """The line below the last answer."""
        return str(self.page.locator(".measured").last.inner_text())

    @property
    def session(self) -> str:
        """The open conversation's id: the address has it."""
        return str(self.page.evaluate("location.hash.slice(1)"))

    @property
    def titles(self) -> list[str]:
        return list(self.page.locator("#sessions .name").all_inner_texts())

    @property
    def focused(self) -> str:
        """The id, or else the label, of what has the focus."""
        script = "(document.activeElement.id || document.activeElement.getAttribute('aria-label'))"
        return str(self.page.evaluate(script))


def watched(browser: Any, url: str, **context: Any) -> Browsed:
    """A new page with the tests' settings, which is not opened yet."""
    settings = context.pop("settings", SETTINGS)
    opened = browser.new_context(**{"viewport": {"width": 1180, "height": 760}} | context)
    opened.set_default_timeout(TIMEOUT_MS)
    kept = json.dumps(json.dumps(settings))
    opened.add_init_script(
        f"localStorage['chatkv-settings'] ??= {kept};{_WATCH}" if settings else _WATCH
    )
    browsed = Browsed(opened.new_page(), url)

    def asked(request: Any) -> None:
        if not request.url.startswith((f"{url}/", "blob:")):
            browsed.wrong.append(f"asked another server: {request.url}")

    def logged(message: Any) -> None:
        is_expected = "Failed to load resource" in message.text  # a refusal, or a server that ended
        if message.type == "error" and not is_expected:
            browsed.wrong.append(message.text)

    opened.on("request", asked)
    browsed.page.on("console", logged)
    browsed.page.on("pageerror", lambda error: browsed.wrong.append(str(error)))
    return browsed
