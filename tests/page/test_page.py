"""The chat page in a real browser: what is said, stopped, taken up again, changed and found."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from browsing import SETTINGS, Browsed
from chatkv.server.listen import Access
from served import ask, served

Browse = Callable[..., Browsed]


@pytest.fixture(scope="module")
def url(own_home: Path, model: str, slow_model: str) -> Iterator[str]:
    with served(model, slow_model) as url:
        yield url


@pytest.fixture
def page(browse: Browse, url: str) -> Browsed:
    opened = browse(url)
    opened.open()
    return opened


def slow(page: Browsed, slow_model: str) -> None:
    page.page.evaluate(
        "(given) => localStorage.setItem('chatkv-settings', given)",
        '{"system": "", "temperature": 0, "maxTokens": 3000, "overflow": "refuse"}',
    )
    page.open()
    page.page.reload()
    page.page.select_option("#model", Path(slow_model).name)


def test_what_is_said_is_answered_and_still_there_after_a_reload(page: Browsed) -> None:
    first = page.say("Tell me of the sea.")
    second = page.say("And of the <b>mountains</b> & rivers?")
    assert first and second
    assert page.said == ["Tell me of the sea.", "And of the <b>mountains</b> & rivers?"]
    assert page.page.title() == "Tell me of the sea. · chatkv"
    assert page.titles[0] == "Tell me of the sea."
    assert re.search(r"\d+ kept · \d+ read · first word .* · \d+ tokens/s", page.measured)
    session, answers = page.session, page.answers
    page.page.reload()
    page.page.locator(".turn").nth(1).wait_for()
    assert (page.session, page.answers) == (session, answers)
    assert page.page.locator("#sessions a[aria-current=page]").inner_text().startswith("Tell me")


def test_an_answer_streams_is_stopped_and_gone_on_with(page: Browsed, slow_model: str) -> None:
    slow(page, slow_model)
    page.write("Go on for long.")
    streaming = page.page.locator(".turn.streaming .markdown")
    page.page.wait_for_function(
        "() => document.querySelector('.turn.streaming .markdown')?.innerText.length > 5"
    )
    assert page.page.locator(".turn").get_attribute("aria-busy") == "true"
    early = streaming.inner_text()
    page.page.wait_for_function(
        "(old) => document.querySelector('.markdown').innerText.length > old", arg=len(early) + 5
    )
    page.press("Escape")
    page.wait_for_answer()
    assert page.page.locator(".end").inner_text().startswith("Stopped here.")
    stopped = page.answer
    assert len(stopped) > 10
    page.page.click(".go-on")
    page.page.wait_for_selector("#stop", state="visible")
    page.page.wait_for_function(
        "(old) => document.querySelector('.markdown').innerText.length > old", arg=len(stopped) + 20
    )
    page.page.click("#stop")
    page.wait_for_answer()
    assert page.answer.startswith(stopped[:10]) and len(page.answer) > len(stopped)


@pytest.mark.slow
def test_leaving_in_the_middle_keeps_what_was_answered(page: Browsed, slow_model: str) -> None:
    slow(page, slow_model)
    page.write("Go on for long, and I leave.")
    page.page.wait_for_function(
        "() => document.querySelector('.turn.streaming .markdown')?.innerText.length > 20"
    )
    page.page.reload()
    page.page.wait_for_selector(".end")
    assert len(page.answer) > 5
    assert page.said == ["Go on for long, and I leave."]


@pytest.mark.slow
def test_an_edit_goes_another_way_and_both_stay(page: Browsed) -> None:
    page.say("Which river is long?")
    page.say("Why?")
    old = page.answers
    page.page.locator(".question").first.hover()
    page.page.locator(".edit").first.click()
    assert page.page.input_value("#composer-text") == "Which river is long?"
    page.press("Escape")
    assert page.page.locator("#editing").is_hidden()
    assert page.page.input_value("#composer-text") == ""
    page.page.locator(".question").first.hover()
    page.page.locator(".edit").first.click()
    page.say("Which lake is deep?")
    page.page.locator(".others").wait_for()
    assert page.said == ["Which lake is deep?"]
    assert page.page.locator(".others").inner_text().split() == ["2", "/", "2"]
    page.page.get_by_label("The one before").click()
    page.page.locator(".turn").nth(1).wait_for()
    assert page.said == ["Which river is long?", "Why?"]
    assert page.answers == old


@pytest.mark.slow
def test_another_answer_to_the_same_question(browse: Browse, url: str) -> None:
    page = browse(url, settings=SETTINGS | {"temperature": 1.5, "system": "Be brief."})
    page.open()
    first = page.say("Draw lots.")
    assert page.page.locator(".system p").text_content() == "Be brief."
    page.page.click(".regenerate")
    page.page.locator(".others").wait_for()
    page.wait_for_answer()
    assert page.said == ["Draw lots."]
    assert page.answer != first
    assert page.page.locator(".system p").text_content() == "Be brief."
    page.page.get_by_label("The one before").click()
    page.page.locator(".others", has_text="1 / 2").wait_for()
    assert page.answer == first


@pytest.mark.slow
def test_a_fork_shares_the_turns_up_to_its_own(page: Browsed) -> None:
    page.say("First of the fork.")
    page.say("Second of the fork.")
    origin, answers = page.session, page.answers
    page.page.locator(".fork").first.click()
    page.page.wait_for_function("(old) => location.hash.slice(1) !== old", arg=origin)
    page.page.locator(".said", has_text="Second").wait_for(state="detached")
    page.page.locator(".said", has_text="First").wait_for()
    assert page.answers == answers[:1]
    page.say("Another second.")
    page.page.go_back()
    page.page.locator(".said", has_text="Second of the fork.").wait_for()
    assert page.answers == answers


@pytest.mark.slow
def test_words_find_the_conversation_that_they_were_said_in(page: Browsed) -> None:
    page.say("A xylophone and a zither.")
    page.press("Control+Shift+O")
    page.say("Something else.")
    page.press("Control+k")
    assert page.focused == "search"
    page.page.keyboard.type("zither xylo")
    page.page.locator("#found", has_text="Found in 1 conversation").wait_for()
    assert page.titles == ["A xylophone and a zither."]
    marks = page.page.locator("#sessions mark").all_inner_texts()
    assert {mark.lower() for mark in marks} == {"zither", "xylo"}
    page.press("ArrowDown")
    page.press("Enter")
    page.page.locator(".said", has_text="A xylophone").wait_for()
    page.page.fill("#search", "nobody ever said this")
    page.page.locator("#found", has_text="Nothing found").wait_for()
    assert page.titles == []


@pytest.mark.slow
def test_names_are_changed_and_nothing_is_deleted_without_consent(page: Browsed) -> None:
    page.say("To be renamed.")
    session = page.session
    item = page.page.locator("#sessions li", has=page.page.locator(f"[data-session='{session}']"))
    item.hover()
    item.locator(".rename").click()
    page.page.locator("dialog input").fill("Ünïcode “title” 🎻")
    page.press("Enter")
    page.page.locator("h1", has_text="Ünïcode “title” 🎻").wait_for()
    page.page.locator("#sessions .name", has_text="Ünïcode").wait_for()
    item.hover()
    item.locator(".delete").click()
    assert "with 1 turn is deleted for good" in page.page.locator("dialog").inner_text()
    assert page.page.evaluate("document.activeElement.textContent") == "Cancel"
    page.press("Escape")
    page.page.locator("dialog").wait_for(state="detached")
    item.hover()
    item.locator(".delete").click()
    page.page.locator("dialog .danger").click()
    item.wait_for(state="detached")
    assert page.session == "" and page.said == []
    assert ask(page.url, f"/sessions/{session}").status == 404


@pytest.mark.slow
def test_dark_and_light(browse: Browse, url: str) -> None:
    page = browse(url, color_scheme="dark")
    page.open()

    def ground() -> int:
        colour = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)))

    assert ground() < 150
    page.page.click("#theme")
    assert page.page.locator("#theme").inner_text() == "Theme: light" and ground() > 650
    page.page.reload()
    assert ground() > 650
    page.page.click("#theme")
    assert ground() < 150
    page.page.click("#theme")
    page.page.emulate_media(color_scheme="light")
    assert page.page.locator("#theme").inner_text() == "Theme: system" and ground() > 650


@pytest.mark.slow
def test_on_a_phone(browse: Browse, url: str) -> None:
    page = browse(url, viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True)
    page.open()
    page.say("A word of " + "W" * 80 + " letters, and a narrow screen.")
    assert page.page.evaluate("document.documentElement.scrollWidth") == 360
    turns = page.page.locator("#turns")
    assert turns.evaluate("list => list.scrollWidth <= list.clientWidth")
    assert page.page.locator("#sidebar").is_hidden()
    page.page.tap("#open-sidebar")
    page.page.wait_for_selector("#sidebar", state="visible")
    assert page.page.get_attribute("#open-sidebar", "aria-expanded") == "true"
    assert page.page.locator("main").evaluate("main => main.inert")
    page.press("Escape")
    page.page.wait_for_selector("#sidebar", state="hidden")
    assert page.focused == "open-sidebar"
    page.page.tap("#open-sidebar")
    page.page.locator("#sessions a").first.tap()
    page.page.wait_for_selector("#sidebar", state="hidden")


@pytest.mark.slow
def test_with_the_keyboard_alone(page: Browsed) -> None:
    assert page.focused == "composer-text"
    page.page.keyboard.type("One line")
    page.press("Shift+Enter")
    page.page.keyboard.type("and another")
    page.press("Enter")
    page.wait_for_answer("One line\nand another")
    assert page.focused == "composer-text"
    page.press("ArrowUp")
    assert page.page.input_value("#composer-text") == "One line\nand another"
    page.press("Escape")
    for _ in range(20):  # back to the last answer's own buttons
        page.press("Shift+Tab")
        if page.page.evaluate("document.activeElement.classList.contains('measured')"):
            break
    page.press("Enter")
    rows = page.page.locator(".timeline tbody th").all_inner_texts()
    assert "Prefill" in rows and "Decode" in rows
    page.press("?")
    assert "a new chat" in page.page.locator("dialog").inner_text()
    page.press("Escape")
    page.press("/")
    assert page.focused == "composer-text"
    page.press("Control+Shift+O")
    assert page.said == [] and page.focused == "composer-text"
    assert page.page.locator("#said").get_attribute("aria-live") == "polite"


def test_what_is_typed_is_read_before_it_is_sent(page: Browsed) -> None:
    page.page.fill("#composer-text", "A long message that is being typed and read ahead. " * 4)
    page.page.locator("#hint", has_text="tokens are ready").wait_for()
    ready = int(page.page.locator("#hint").inner_text().split()[0])
    page.press("Enter")
    page.wait_for_answer()
    assert ready > 20
    assert int(page.measured.split()[0]) >= ready  # kept


@pytest.mark.slow
def test_what_is_typed_while_the_page_begins_is_read_then(browse: Browse, url: str) -> None:
    page, held = browse(url), list[Any]()

    def hold(route: Any) -> None:
        held.append(route)

    page.page.route("**/v1/models", hold)
    page.page.goto(url)
    page.page.fill("#composer-text", "Somebody types fast, and the server is slow to begin. " * 4)
    page.page.wait_for_timeout(700)  # longer than typing has to rest
    assert held
    for route in held:
        route.continue_()
    page.page.wait_for_timeout(700)  # it has begun, and dropped what was asked for before
    page.page.locator("#hint", has_text="tokens are ready").wait_for()


@pytest.mark.slow
def test_a_refusal_is_said_and_gives_the_message_back(page: Browsed) -> None:
    page.say("Short.")
    text = "far too long for this model " * 400
    page.write(text)
    page.page.locator(".notice.error", has_text="tokens").wait_for()
    page.page.wait_for_function(
        "(text) => document.querySelector('#composer-text').value === text", arg=text
    )
    assert page.said == ["Short."]


@pytest.mark.slow
def test_the_server_may_end_and_come_back(
    browse: Browse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setenv("CHATKV_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CHATKV_ENGINE", raising=False)
    with served(model) as url:
        page = browse(url)
        page.open()
        page.say("The history, which is a little longer than one block of tokens. " * 3)
        answers = page.answers
        page.page.fill("#composer-text", "")
    page.write("Are you there?")
    page.page.locator("#banner", has_text="cannot be reached").wait_for()
    page.page.locator(".notice.error", has_text="What was said is saved").wait_for()
    page.page.wait_for_function(
        "() => document.querySelector('#composer-text').value.startsWith('Are you')"
    )
    with served(model, port=urlsplit(url).port or 0):
        page.page.wait_for_selector("#banner", state="hidden")
        page.press("Enter")
        page.page.wait_for_function("() => document.querySelectorAll('.measured').length === 2")
        assert page.answers[:1] == answers
        assert page.page.locator(".notice.error").count() == 0
        assert re.search(r"\d+ (from disk|kept)", page.measured)


@pytest.mark.slow
def test_a_token_is_asked_for_once(browse: Browse, own_home: Path, model: str, url: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHATKV_HOME", str(own_home / "guarded"))
        with served(model, access=Access(("wörd", "other"))) as guarded:
            page = browse(guarded)
            page.page.goto(guarded)
            field = page.page.locator("dialog input")
            field.fill("wrong")
            page.press("Enter")
            page.page.locator("dialog", has_text="does not fit").wait_for()
            page.page.locator("dialog input").fill("wörd")
            page.press("Enter")
            page.page.wait_for_selector("#model option", state="attached")
            assert page.say("Mine alone.")
            page.page.reload()
            page.page.locator(".said", has_text="Mine alone.").wait_for()
            assert page.page.locator("dialog").count() == 0
            session = page.session
            other = {"Authorization": "Bearer other"}
            assert ask(guarded, "/sessions", **other).json == {"sessions": []}
            assert ask(guarded, f"/sessions/{session}", **other).status == 404
            assert ask(guarded, f"/sessions/{session}").status == 401


@pytest.mark.slow
def test_the_real_model(browse: Browse, own_home: Path, smollm2_gguf: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHATKV_HOME", str(own_home / "real"))
        with served(str(smollm2_gguf)) as url:
            page = browse(url, settings=SETTINGS | {"maxTokens": 60})
            page.open()
            page.say("What is the capital of France?")
            assert "Paris" in page.answer
            page.say("And of Italy?")
            session, answers = page.session, page.answers
        with served(str(smollm2_gguf), port=urlsplit(url).port or 0):
            page.page.reload()
            page.page.locator(".turn").nth(1).wait_for()
            assert page.session == session
            assert page.answers == answers
            page.say("Thank you.")
            assert re.search(r"\d+ (from disk|kept)", page.measured)
