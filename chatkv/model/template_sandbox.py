"""Jinja for chat templates that nobody has vetted: what a model brings must not stop the program.

The environment is set up as transformers does it, so that templates render the same. Jinja's own
sandbox keeps them from Python's internals and from changing what they are given; on top of it every
loop, call, filter and operator pays from a budget (`template_budget.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from jinja2 import TemplateError, Undefined, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from chatkv.model.template_budget import TooMuch, budget, fresh_budget

MAX_SOURCE_CHARS = 500_000

# Filters that templates use. The others are left out, some for making much out of little.
_FILTERS = frozenset(
    {"abs", "bool", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first"}
    | {"float", "format", "groupby", "indent", "int", "items", "join", "last", "length", "list"}
    | {"lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round", "safe"}
    | {"select", "selectattr", "sort", "string", "title", "trim", "unique", "upper", "wordcount"}
)
# Methods of strings that lead to bytes, or blow up character by character.
_UNSAFE_STRING_METHODS = frozenset({"encode", "translate", "maketrans"})


def render_limited(template: Any, variables: dict[str, Any]) -> str:
    """`template.render(variables)` within a fresh budget; raises what jinja and the template do."""
    with fresh_budget():
        pieces, length = [], 0
        for piece in template.generate(variables):
            length += len(piece)
            budget().text(length, times=0)
            pieces.append(piece)
        return "".join(pieces)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles one chat template. `strftime` stands for "now" in the template's strftime_now."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, strftime: Callable[[str], str]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlock, loopcontrols],
            finalize=_text,
        )
        known = self.filters
        self.filters = {name: _paying(name, known[name]) for name in known if name in _FILTERS}
        self.filters |= {"tojson": _tojson, "_loop": _loop, "_concat": _concat, "_made": _made}
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: _strftime(strftime, form)
        self._literal_chars = 0

    def compile_template(self, source: str) -> Any:
        if len(source) > MAX_SOURCE_CHARS:
            raise TooMuch("its source is too long")
        return self.from_string(source)

    # -- what syntax pays: loops, `~`, and literal lists and dicts ------------------------------

    def _generate(
        self,
        source: nodes.Template,
        name: str | None,
        filename: str | None,
        defer_init: bool = False,
    ) -> str:
        """Called by jinja between parsing and compiling: send syntax through filters that pay."""
        self._literal_chars = _literal_chars(source)
        for loop in list(source.find_all(nodes.For)):
            loop.iter = self._filter("_loop", loop.iter, nodes.Const(_literal_chars(loop)))
        self._pay_for_children(source)
        return super()._generate(source, name, filename, defer_init)

    def _pay_for_children(self, node: nodes.Node) -> None:
        for field, value in node.iter_fields():
            if isinstance(value, list):
                value[:] = [self._paid(child) for child in value]
            elif isinstance(value, nodes.Node):
                setattr(node, field, self._paid(value))

    def _paid(self, node: Any) -> Any:
        if not isinstance(node, nodes.Node):
            return node
        self._pay_for_children(node)
        if isinstance(node, nodes.Concat):
            return self._filter("_concat", nodes.List(node.nodes, lineno=node.lineno))
        if isinstance(node, (nodes.List, nodes.Dict)) or (
            isinstance(node, nodes.Tuple) and node.ctx == "load"
        ):
            return self._filter("_made", node)
        return node

    def _filter(self, name: str, value: nodes.Node, *args: nodes.Expr) -> nodes.Node:
        made = nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)
        return made.set_environment(self)

    # -- what jinja asks its sandbox about -------------------------------------------------------

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        paying = budget()
        paying.step()
        if operator == "+":
            paying.sum(left, right)
        elif operator == "*":
            paying.product(left, right)
        elif operator == "**":
            paying.power(left, right)
        elif isinstance(left, str):
            paying.format(left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        paying = budget()
        paying.step()
        text = getattr(target, "__self__", None)
        if isinstance(text, str):
            args = _pay_for_method(text, target.__name__, args)
        elif isinstance(target, LoopContext) and args:  # a recursive loop goes one level down
            args = (_loop(context, args[0], self._literal_chars), *args[1:])
        made = super().call(context, target, *args, **kwargs)
        return paying.nested(made) if isinstance(made, dict) else paying.made(made)

    def getitem(self, obj: Any, argument: Any) -> Any:
        found = super().getitem(obj, argument)
        return budget().made(found) if isinstance(argument, slice) else found

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, (int, float, bytes)):
            return False
        if isinstance(obj, str) and attr in _UNSAFE_STRING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def limited(*args: Any, **kwargs: Any) -> str:
            budget().format(value.__self__, *args, *kwargs.values())
            return str(wrapped(*args, **kwargs))

        return limited


class GenerationBlock(Extension):
    """`{% generation %}`, which marks replies for training; here its body as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _literal_chars(node: nodes.Node) -> int:
    """How much text stands in the source below `node`."""
    return sum(len(data.data) for data in node.find_all(nodes.TemplateData))


def _pay_for_method(text: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Pay for a method of strings that can make much out of little; returns the arguments."""
    paying = budget()
    paying.numbers(*args)
    if name == "replace" and len(args) >= 2:
        paying.replace(text, str(args[0]), str(args[1]))
    elif name == "join" and args:
        args = (list(args[0]),)
        paying.join(text, args[0])
    elif name == "expandtabs":
        paying.text(len(text) + text.count("\t") * int(args[0] if args else 8))
    return args


# -- filters -------------------------------------------------------------------------------------


def _paying(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of jinja's that pays for what it makes."""
    passes = getattr(function, "jinja_pass_arg", None)

    @pass_context
    def paid(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        paying = budget()
        paying.step()
        paying.numbers(*args, *kwargs.values())
        if name == "replace" and len(args) >= 2:
            paying.replace(str(value), str(args[0]), str(args[1]))
        elif name == "join":
            value = list(value)
            paying.join(str(args[0] if args else kwargs.get("d", "")), value)
        elif name == "format":
            paying.format(str(value), *args, *kwargs.values())
        elif name == "indent":
            width = args[0] if args else kwargs.get("width", 4)
            width = len(width) if isinstance(width, str) else int(width)
            paying.text(len(str(value)) + (str(value).count("\n") + 1) * width)
        if passes is None:
            return paying.made(function(value, *args, **kwargs))
        places = {"context": context, "eval_context": context.eval_ctx}
        place = places.get(passes.name, context.environment)
        return paying.made(function(place, value, *args, **kwargs))

    return paid


@pass_context
def _loop(context: Any, items: Any, literal_chars: int) -> Any:
    """Items of a loop whose body writes so many characters of its own each time round."""
    try:
        count = len(items)
    except TypeError:
        return _counted(items, literal_chars)
    budget().step(count + 1)
    budget().text(literal_chars, times=count)
    return items


def _counted(items: Iterable[Any], literal_chars: int) -> Iterator[Any]:
    for item in items:
        budget().step()
        budget().text(literal_chars)
        yield item


@pass_context
def _concat(context: Any, parts: list[Any]) -> str:
    budget().step()
    return "".join([_text(part) for part in parts])


@pass_context
def _made(context: Any, value: Any) -> Any:
    return budget().nested(value)


def _text(value: Any) -> str:
    """What `{{ value }}` writes."""
    if not isinstance(value, Undefined):
        budget().nested(value)
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
    budget().nested(value)
    if indent is not None and (not isinstance(indent, int) or indent > 16):
        raise TooMuch("it indents too far")
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    return str(budget().made(text))


def _strftime(strftime: Callable[[str], str], form: str) -> str:
    budget().format(form)
    return strftime(form)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(str(message))
