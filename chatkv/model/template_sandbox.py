"""Jinja for chat templates that nobody has vetted: what a model brings must not stop the program.

The environment is set up as transformers does it, so that templates render the same; on top of
jinja's own sandbox (no access to Python's internals, no changing of lists and dicts) every
rendering has a budget of steps, CPU time and characters. Loops, calls, filters and operators pay
from it before or as they produce, and `TooMuch` ends a template that asks for more.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, NoReturn

from jinja2 import TemplateError, Undefined, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# A conversation that fills a context of a million tokens is about 5 million characters.
MAX_SOURCE_CHARS = 500_000
MAX_STEPS = 1_000_000
MAX_CPU_SECONDS = 10.0
MAX_TEXT_CHARS = 10_000_000  # one string
MAX_TOTAL_CHARS = 100_000_000  # all strings made on the way together
MAX_NUMBER = 100_000  # as a width, a count or the like

# Filters that templates use. The others are left out, some for making much out of little.
_FILTERS = frozenset(
    {"abs", "bool", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first"}
    | {"float", "format", "groupby", "indent", "int", "items", "join", "last", "length", "list"}
    | {"lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round", "safe"}
    | {"select", "selectattr", "sort", "string", "sum", "title", "trim", "unique", "upper"}
    | {"wordcount"}
)
_LARGE_WIDTH = re.compile(r"\d{5}|%[^a-zA-Z%]*\*")


class TooMuch(TemplateError):
    """A template went over its budget."""


class Budget:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self.steps = MAX_STEPS
        self.chars = MAX_TOTAL_CHARS
        self.deadline = time.thread_time() + MAX_CPU_SECONDS

    def step(self, count: int = 1) -> None:
        self.steps -= count
        if self.steps < 0 or time.thread_time() > self.deadline:
            raise TooMuch("it takes too long")

    def spend(self, chars: int) -> None:
        self.chars -= chars
        if self.chars < 0:
            raise TooMuch("it makes too much text")

    def pay(self, chars: int) -> None:
        """For one string (or list) of that length."""
        if chars > MAX_TEXT_CHARS:
            raise TooMuch("it makes too long a text")
        self.spend(chars)

    def result(self, value: Any) -> Any:
        """Pay for a string or list that was just made; anything else is free."""
        if isinstance(value, (str, list, tuple)):
            self.pay(len(value))
        return value

    def tree(self, value: Any) -> None:
        """Pay for the text of nested values before it is made: shared parts count each time."""
        if isinstance(value, str):
            self.pay(len(value))
        elif isinstance(value, dict):
            for key, child in value.items():
                self.tree(key)
                self.tree(child)
        elif isinstance(value, (list, tuple)):
            for child in value:
                self.tree(child)
        self.step()


_budget: ContextVar[Budget] = ContextVar("budget")


def render_limited(template: Any, variables: dict[str, Any]) -> str:
    """`template.render(variables)` within a fresh budget; raises what jinja and the template do."""
    token = _budget.set(Budget())
    try:
        pieces = []
        length = 0
        for piece in template.generate(variables):
            length += len(piece)
            if length > MAX_TEXT_CHARS:
                raise TooMuch("it makes too much text")
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _budget.reset(token)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates. `strftime` stands for "now" in the template's strftime_now."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, strftime: Callable[[str], str]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlock, loopcontrols],
            finalize=_output,
        )
        known = self.filters
        self.filters = {name: _paying(name, known[name]) for name in known if name in _FILTERS}
        self.filters |= {"tojson": _tojson, "_loop": _loop, "_concat": _concat}
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name, None)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: strftime(_modest(form))

    def compile_template(self, source: str) -> Any:
        if len(source) > MAX_SOURCE_CHARS:
            raise TooMuch("its source is too long")
        return self.from_string(source)

    def _generate(
        self,
        source: nodes.Template,
        name: str | None,
        filename: str | None,
        defer_init: bool = False,
    ) -> str:
        """Let every loop and every `~` go through a filter that pays."""
        for loop in list(source.find_all(nodes.For)):
            literal = sum(len(data.data) for data in loop.find_all(nodes.TemplateData))
            loop.iter = self._filter("_loop", loop.iter, nodes.Const(literal + 1))
        self._pay_for_concat(source)
        return super()._generate(source, name, filename, defer_init)

    def _pay_for_concat(self, node: nodes.Node) -> None:
        for field, value in node.iter_fields():
            if isinstance(value, nodes.Node):
                node_list = [value]
            elif isinstance(value, list):
                node_list = [item for item in value if isinstance(item, nodes.Node)]
            else:
                continue
            for child in node_list:
                self._pay_for_concat(child)
                if isinstance(child, nodes.Concat):
                    paid = self._filter("_concat", nodes.List(child.nodes, lineno=child.lineno))
                    if isinstance(value, list):
                        value[value.index(child)] = paid
                    else:
                        setattr(node, field, paid)

    def _filter(self, name: str, value: nodes.Node, *args: nodes.Expr) -> nodes.Node:
        made = nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)
        return made.set_environment(self)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        budget.step()
        if operator == "+" and isinstance(left, (str, list, tuple)):
            budget.pay(len(left) + (len(right) if isinstance(right, (str, list, tuple)) else 0))
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
                    budget.pay(len(sequence) * max(count, 0))
            _modest_integers(left, right)
        elif operator == "**":
            if isinstance(right, (int, float)) and abs(right) > 64:
                raise TooMuch("it computes too large a number")
            _modest_integers(left, right)
        elif operator == "%" and isinstance(left, str):
            _modest(left)
            budget.tree(right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.step()
        text = getattr(target, "__self__", None)
        if isinstance(text, str):
            _pay_for_method(budget, text, target.__name__, args)
        return budget.result(super().call(context, target, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        found = super().getitem(obj, argument)
        return _budget.get().result(found) if isinstance(argument, slice) else found

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def limited(*args: Any, **kwargs: Any) -> str:
            _modest(value.__self__)
            _modest_integers(*args, *kwargs.values())
            _budget.get().tree([args, kwargs])
            return str(wrapped(*args, **kwargs))

        return limited


class GenerationBlock(Extension):
    """`{% generation %}`, which marks replies for training; here its body as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _paying(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of jinja's that pays for what it makes."""
    passes = getattr(function, "jinja_pass_arg", None)
    leading = 0 if passes is None else 1

    @pass_context
    def paid(context: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.step()
        value, rest = args[0], args[1:]
        _modest_integers(*rest, *kwargs.values())
        if name == "replace":
            _pay_for_method(budget, str(value), "replace", [str(r) for r in rest])
        elif name == "join":
            value = list(value)
            budget.tree(value)
            budget.pay(len(str(rest[0] if rest else kwargs.get("d", ""))) * len(value))
        elif name == "format":
            _modest(str(value))
            budget.tree([rest, kwargs])
        elif name == "indent":
            width = rest[0] if rest else kwargs.get("width", 4)
            size = len(width) if isinstance(width, str) else int(width)
            budget.pay(len(str(value)) + (str(value).count("\n") + 1) * size)
        elif name in ("string", "e", "escape", "trim", "upper", "lower", "title", "capitalize"):
            budget.tree(value)
        first = (_first_argument(passes, context),) if leading else ()
        return budget.result(function(*first, value, *rest, **kwargs))

    return paid


def _first_argument(passes: Any, context: Any) -> Any:
    """What a filter of jinja's own wants before the value."""
    kind = passes.name
    return {"context": context, "eval_context": context.eval_ctx}.get(kind, context.environment)


def _pay_for_method(budget: Budget, text: str, name: str, args: Iterable[Any]) -> None:
    """Pay for a string method that can make much out of little."""
    args = list(args)
    _modest_integers(*args)
    if name == "replace" and len(args) >= 2:
        budget.pay(len(text) + text.count(str(args[0])) * len(str(args[1])))
    elif name == "join" and args and isinstance(args[0], (list, tuple, str, dict)):
        budget.tree(args[0])
        budget.pay(len(text) * len(args[0]))
    elif name == "expandtabs":
        budget.pay(len(text) + text.count("\t") * (args[0] if args else 8))


@pass_context
def _loop(context: Any, items: Any, cost: int) -> Any:
    """Items of a loop whose body costs `cost` (its own literal text) each time round."""
    budget = _budget.get()
    try:
        count = len(items)
    except TypeError:
        return _counted(items, cost)
    budget.step(count + 1)
    budget.spend(count * cost)
    return items


def _counted(items: Iterable[Any], cost: int) -> Iterator[Any]:
    for item in items:
        budget = _budget.get()
        budget.step()
        budget.spend(cost)
        yield item


@pass_context
def _concat(context: Any, parts: list[Any]) -> str:
    budget = _budget.get()
    budget.step()
    return "".join([_text(budget, part) for part in parts])


def _output(value: Any) -> Any:
    """Called with each `{{ value }}`, at rendering and for constants already at compiling."""
    budget = _budget.get(None)
    return value if budget is None else _text(budget, value)


def _text(budget: Budget, value: Any) -> str:
    if not isinstance(value, Undefined):
        budget.tree(value)
    return str(value)


@pass_context
def _tojson(
    context: Any,
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """transformers' own: no HTML escapes, and other scripts as they are."""
    budget = _budget.get()
    budget.tree(value)
    if indent is not None and (not isinstance(indent, int) or indent > 16):
        raise TooMuch("it indents too far")
    return str(
        budget.result(
            json.dumps(
                value,
                ensure_ascii=ensure_ascii,
                indent=indent,
                separators=separators,
                sort_keys=sort_keys,
            )
        )
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(str(message))


def _modest(form: str) -> str:
    """A format string that asks for no great width."""
    if _LARGE_WIDTH.search(form):
        raise TooMuch("it formats too widely")
    return form


def _modest_integers(*values: Any) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise TooMuch("it uses too large a number")
