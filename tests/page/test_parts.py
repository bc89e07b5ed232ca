"""The page's modules by themselves: what Markdown becomes, the bar, the timeline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browsing import Browsed, watched
from served import served


@pytest.fixture(scope="module")
def url(own_home: Path, model: str) -> Iterator[str]:
    with served(model) as url:
        yield url


@pytest.fixture(scope="module")
def page(chromium: Any, url: str) -> Iterator[Browsed]:
    """One page for all: each test adds to its end, and nothing may ever break it."""
    opened = watched(chromium, url)
    opened.open()
    yield opened
    opened.close()


SHOW = """async (texts) => {
  const { Markdown } = await import("/page/markdown.js");
  const element = document.createElement("div");
  document.body.append(element);
  const markdown = new Markdown(element);
  for (const text of texts.slice(0, -1)) markdown.update(text);
  markdown.finish(texts.at(-1));
  return element.innerHTML;
}"""


def shown(page: Browsed, *texts: str) -> str:
    """The HTML that the last of `texts` becomes, after the others."""
    return str(page.page.evaluate(SHOW, list(texts)))


@pytest.mark.parametrize(
    "text",
    [
        "<script>window.broken = 1</script>",
        "<img src=x onerror='window.broken = 1'>",
        "<svg/onload=window.broken=1>",
        "[click](javascript:window.broken=1)",
        "[click](JaVaScRiPt&colon;window.broken=1)",
        "[click](data:text/html,<script>window.broken=1</script>)",
        "[click](vbscript:x)",
        "![x](https://elsewhere.example/pixel.png)",
        '![x" onerror="window.broken=1](https://elsewhere.example/y.png)',
        "```html\n<script>window.broken = 1</script>\n```",
        '```js"><img src=x onerror=window.broken=1>\ncode\n```',
        "<iframe srcdoc='<script>parent.broken=1</script>'></iframe>",
        "<style>* { display: none }</style>",
        "<base href='https://elsewhere.example/'>",
        "<form action='https://elsewhere.example/'><input name=x></form>",
        "<a href='https://x.example' style='position:fixed' id=composer>x</a>",
        "<math><mtext><table><mglyph><style><img src=x onerror=window.broken=1>",
        "| a |\n|:-:|\n| <img src=x onerror=window.broken=1> |",
    ],
)
def test_nothing_that_a_model_writes_runs_or_is_fetched(page: Browsed, text: str) -> None:
    shown(page, text)
    shown(page, *(text[:end] for end in range(1, len(text) + 1, 3)), text)
    page.page.wait_for_timeout(20)
    assert page.page.evaluate("window.broken") is None
    forbidden = "script, img, svg, iframe, style, form, input, base, [style], [id], [onerror]"
    inside = f".block :is({forbidden}):not(button svg)"
    assert page.page.locator(inside).count() == 0
    links = page.page.eval_on_selector_all(".block a", "links => links.map((one) => one.href)")
    assert all(link.startswith(("https://", "http://", "mailto:")) for link in links)


def test_markdown_becomes_what_it_means(page: Browsed) -> None:
    text = (
        "# Title\n\nSome **bold**, *slanted*, `code`, ~~gone~~ and https://x.example.\n\n"
        "1. one\n2. two\n   - inner\n\n> said\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n"
        "```python\nreturn 'x < y'\n```\n\n[named][x]\n\n[x]: https://named.example\n"
    )
    html = shown(page, text)
    for part in (
        "<h1>Title</h1>",
        "<strong>bold</strong>",
        "<s>gone</s>",
        "<li>inner</li>",
        "<blockquote>",
        'class="side-right">2<',
        'class="hljs-keyword">return<',
        'href="https://named.example"',
        'rel="noopener noreferrer nofollow"',
    ):
        assert part in html, part
    pieces = [text[:end] for end in range(0, len(text), 7)]
    assert shown(page, *pieces, text) == html


def test_blocks_that_stand_are_left_alone(page: Browsed) -> None:
    kept = page.page.evaluate(
        """async () => {
          const { Markdown } = await import("/page/markdown.js");
          const element = document.createElement("div");
          const markdown = new Markdown(element);
          markdown.update("First.\\n\\nSecond");
          const first = element.firstChild;
          markdown.update("First.\\n\\nSecond, longer.\\n\\n- Third");
          return [first === element.firstChild, element.children.length];
        }"""
    )
    assert kept == [True, 3]


def test_thoughts_are_told_apart(page: Browsed) -> None:
    split = page.page.evaluate(
        """async (texts) => {
          const { thoughtsIn } = await import("/page/markdown.js");
          return texts.map((text) => Object.values(thoughtsIn(text)));
        }""",
        ["plain", "<think>hm", "<think>hm\n</think>\n\nyes", "hm</think>yes"],
    )
    assert split == [["", "plain"], ["hm", ""], ["hm", "yes"], ["hm", "yes"]]


def test_the_bar_begins_with_what_is_kept(page: Browsed) -> None:
    script = """async (events) => {
      const { Progress } = await import("/page/progress.js");
      const element = document.createElement("div");
      const progress = new Progress(element);
      return events.map((event) => {
        progress.follow(event);
        const [kept, made] = [progress.kept.style.width, progress.made.style.width];
        return [element.hidden, kept, made, progress.bar.ariaValueNow, progress.words.textContent];
      });
    }"""

    def news(stage: str, done: int, total: int) -> dict[str, Any]:
        return {"event": "progress", "stage": stage, "done": done, "total": total}

    told = page.page.evaluate(
        script,
        [
            news("loading the model", 0, 1),
            news("restore", 3, 4),
            news("prefill", 300, 1200),
            news("prefill", 900, 1200),
        ],
    )
    assert told == [
        [False, "0%", "0%", "0", "Loading the model: 0 %"],
        [False, "0%", "75%", "75", "Loading from disk: 75 %"],
        [False, "25%", "0%", "25", "Reading: 300 of 1,200 tokens, 300 of them kept"],
        [False, "25%", "50%", "75", "Reading: 900 of 1,200 tokens, 300 of them kept"],
    ]


STATS = {
    "tokens": {"prompt": 900, "reused": 64, "loaded": 768, "computed": 68, "generated": 51},
    "plan": {
        "chosen": "reload",
        "predicted_ms": 40.0,
        "actual_ms": 95.0,
        "alternatives_ms": {"reload": 40.0, "re-prefill": 800.0, "both": 45.0},
    },
    "timing": {
        "load_model_ms": 100.0,
        "restore_ms": 20.0,
        "prefill_ms": 70.0,
        "ttft_ms": 95.0,
        "decode_tokens_per_s": 50.0,
    },
    "loaded_bytes": 3 << 20,
    "regret_ms": 55.0,
    "notices": ["1 block was damaged"],
}


def test_the_timeline_tells_what_was_expected_and_what_it_took(page: Browsed) -> None:
    lines = page.page.evaluate(
        """async (stats) => {
          const { timeline } = await import("/page/timeline.js");
          const element = timeline(stats);
          document.body.append(element);
          return element.innerText.split("\\n").map((line) => line.replaceAll("\\t", " "));
        }""",
        STATS,
    )
    text = "\n".join(" ".join(line.split()) for line in lines if line.strip())
    for line in (
        "In memory 0 ms 64 tokens · already there",
        "Disk to memory 20 ms 768 tokens · 3.0 MiB · 150 MiB/s",
        "Prefill 70 ms 68 tokens · 971 tokens/s",
        "Around it 5 ms template, plan, commit",
        "Decode 1.0 s 51 tokens · 50 tokens/s",
        "reload, chosen expected 40 ms",
        "took 95 ms",
        "both expected 45 ms",
        "re-prefill expected 800 ms",
        "55 ms more than the fastest plan was expected to take.",
        "1 block was damaged",
    ):
        assert line in text, text
