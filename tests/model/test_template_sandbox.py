"""Templates that ask for too much are stopped, soon and in little memory."""

from __future__ import annotations

import resource
import time

import pytest

from chatkv.errors import ModelError
from chatkv.model import template_budget
from chatkv.model.template import ChatTemplate

CHAT = [{"role": "user", "content": "Hi"}]

HOSTILE = {
    "long loop": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "range": "{{ range(10 ** 9) | list | length }}",
    "loop over a string": "{% for a in 'x' * 9000000 %}{% endfor %}",
    "multiply": "{{ 'a' * 10 ** 10 }}",
    "multiply a list": "{{ ([1] * 10 ** 5 * 10 ** 5) | length }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "product": "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}"
    "{% endfor %}{{ n.x }}",
    "doubling": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "doubling with ~": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "doubling a list": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}{{ n.x | length }}",
    "nested lists": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "nested lists as text": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | string | length }}",
    "nested lists as json": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson | length }}",
    "replace": "{% set x = 'a' * 90000 %}{{ x.replace('a', x).replace('a', x) | length }}",
    "replace filter": "{% set x = 'a' * 90000 %}{{ x | replace('a', x) | length }}",
    "join": "{% set x = 'a' * 90000 %}{{ x.join('b' * 90000) | length }}",
    "join filter": "{% set x = 'a' * 90000 %}{{ range(90000) | join(x) | length }}",
    "indent": "{{ ('\n' * 90000) | indent(99999) | length }}",
    "width": "{{ '%1000000000d' % 1 }}",
    "width by argument": "{{ '%*d' % (1000000000, 1) }}",
    "width in format": "{{ '{:1000000000}'.format(1) }}",
    "width in format by argument": "{{ '{:{}}'.format('a', 1000000000) }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "justified": "{{ 'a'.ljust(1000000000) }}",
    "centred": "{{ 'a'.center(1000000000) }}",
    "tabs": "{{ ('\t' * 90000).expandtabs(99999) }}",
    "json indent": "{{ [1] | tojson(indent=1000000000) }}",
    "date": "{{ strftime_now('%1000000000Y') }}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "long output": "{% for i in range(99999) %}" + "x" * 2000 + "{% endfor %}",
    "long block": "{% set x %}{% for i in range(99999) %}"
    + "x" * 2000
    + "{% endfor %}{% endset %}",
    "many copies": "{% set n = namespace(x=[]) %}{% set big = 'a' * 900000 %}"
    "{% for i in range(9999) %}{% set n.x = n.x + [big[1:]] %}{% endfor %}",
    "upper copies": "{% set n = namespace(x=[]) %}{% set big = 'a' * 900000 %}"
    "{% for i in range(9999) %}{% set n.x = n.x + [big | upper] %}{% endfor %}",
    "comparing": "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
    "hashing": "{% set n = namespace(x=(1,)) %}{% for i in range(60) %}"
    "{% set n.x = (n.x, n.x) %}{% endfor %}{{ {n.x: 1} | length }}",
    "nested dicts": "{% set n = namespace(x={}) %}{% for i in range(60) %}"
    "{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}{{ n.x == n.x.copy() }}",
    "recursive loop": "{% for i in range(90000) recursive %}"
    "{% if loop.depth < 4 %}{{ loop(range(90000)) }}{% endif %}{% endfor %}",
    "recursive text": "{% for i in [1] recursive %}"
    + "x" * 9999
    + "{% if loop.depth < 2 %}{{ loop(range(90000)) }}{% endif %}{% endfor %}",
    "translate": "{{ 'a'.translate({97: 'b' * 90000}) }}",
    "bytes": "{{ ('a'.encode() * 90000) * 90000 }}",
    "number to bytes": "{{ (5).to_bytes(100000) * 100000 }}",
    "join a generator": "{% set x = 'a' * 90000 %}{{ x.join(range(90000) | map('string')) }}",
    "sum": "{{ ([[1] * 90000] * 90000) | sum(start=[]) }}",
    "lipsum": "{{ lipsum(n=100000) }}",
    "long source": "x" * 1_000_000,
}


@pytest.fixture
def fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the steps: those that the real limit allows take a second or two."""
    monkeypatch.setattr(template_budget, "MAX_STEPS", template_budget.MAX_STEPS // 10)


@pytest.mark.parametrize("name", HOSTILE)
def test_is_stopped(name: str, fewer_steps: None) -> None:
    stops(name)


@pytest.mark.parametrize("name", ["comparing"])
def test_is_stopped_by_the_real_limit(name: str) -> None:
    stops(name)


def stops(name: str) -> None:
    before_s = time.thread_time()
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError) as caught:
        ChatTemplate(HOSTILE[name]).render(CHAT)
    assert "\n" not in str(caught.value)
    assert time.thread_time() - before_s < 15
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 600_000


def test_a_long_conversation_is_not() -> None:
    source = (
        "{% set n = namespace(seen=0) %}{% for m in messages %}{% set n.seen = n.seen + 1 %}"
        "{{ n.seen ~ ':' ~ m.role | upper }} {{ m.content | trim }}{{ '\n' * 2 }}{% endfor %}"
    )
    chat = [{"role": "user", "content": " word" * 200}] * 3000
    text = ChatTemplate(source).render(chat).text
    assert text.count("USER") == 3000 and text.endswith("word\n\n")


def test_limits_hold_per_rendering(fewer_steps: None) -> None:
    template = ChatTemplate("{% for i in range(9000) %}{{ i }}{% endfor %}")
    for _ in range(12):
        assert template.render(CHAT).text.endswith("8999")
