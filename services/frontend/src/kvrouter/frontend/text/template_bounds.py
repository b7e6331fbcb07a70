"""Bounds the work of a chat template. A template is a program of whoever published the model.

Jinja's sandbox keeps a template away from Python's internals, but not from endless loops and huge values. Here every
block of statements running costs a step, and every operation making a new text or container costs its size. What
could exceed its bound is refused before it is executed.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 2_000_000
"""Blocks of statements a rendering may run: about a second. A chat of 1,000 messages takes some 20,000."""
MAX_SECONDS = 2.0
"""Time a rendering may take."""
MAX_SIZE = 16 << 20
"""Characters a text may have."""
MAX_ITEMS = 1 << 18
"""Items a container with its containers may have."""
MAX_TOTAL = 256 << 20
"""Characters and items a rendering may make altogether."""
_STEPS_PER_CLOCK = 256

_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
"""Methods of texts whose argument is the length of the result."""
_UNBOUNDED_FORMAT = re.compile(r"[0-9]{4}|\{[^{}]*\{|\*")
"""A format with a long or computed width."""


class TemplateTooExpensive(Exception):
    """A template exceeds a bound."""


@dataclass(slots=True)
class Allowance:
    """Budget of a rendering while it does not run."""

    steps: int = field(default_factory=lambda: MAX_STEPS)
    characters: int = field(default_factory=lambda: MAX_TOTAL)
    seconds: float = field(default_factory=lambda: MAX_SECONDS)


class _Budget(threading.local):
    """Budget of the rendering in this thread."""

    def __init__(self) -> None:
        self.resume(Allowance())

    def resume(self, allowance: Allowance) -> None:
        """Continues a rendering in this thread."""
        self._steps = allowance.steps
        self._left = allowance.characters
        self._ends_at = time.monotonic() + allowance.seconds

    def pause(self) -> Allowance:
        """Returns the rest of the rendering's budget, so another one can run in this thread."""
        return Allowance(self._steps, self._left, self._ends_at - time.monotonic())

    @property
    def steps_left(self) -> int:
        """Blocks of statements the rendering may still run."""
        return self._steps

    def spend(self) -> None:
        """Spends a step.

        Raises:
            TemplateTooExpensive: none is left, or the time is over.
        """
        self._steps -= 1
        if self._steps < 0:
            raise TemplateTooExpensive(f"it runs more than {MAX_STEPS} blocks of statements")
        if self._steps % _STEPS_PER_CLOCK == 0 and time.monotonic() > self._ends_at:
            raise TemplateTooExpensive(f"it takes longer than {MAX_SECONDS:g} s")

    def charge(self, size: int) -> None:
        """Charges for a value of this size before it is made.

        Raises:
            TemplateTooExpensive: it is too large, or nothing is left.
        """
        self._left -= max(size, 0)
        if size > MAX_SIZE:
            raise TemplateTooExpensive(f"it makes a value larger than {MAX_SIZE} characters")
        if self._left < 0:
            raise TemplateTooExpensive(f"it makes values of more than {MAX_TOTAL} characters and items")

    def text(self, value: Any) -> str:
        """Returns a value as text."""
        text = value if isinstance(value, str) else str(self.container(value))
        self.charge(len(text))
        return text

    def container(self, value: Any) -> Any:
        """Charges for a container and all that it contains, as often as it contains it. Returns it."""
        pending, size = [value], 1
        while pending:
            item = pending.pop()
            if isinstance(item, Mapping):
                size += 2 * len(item)
                pending += item.keys()
                pending += item.values()
            elif isinstance(item, list | tuple):
                size += len(item)
                pending += item
            if size > MAX_ITEMS:
                raise TemplateTooExpensive(f"it makes a container with more than {MAX_ITEMS} items")
        self.charge(size)
        return value


class _Generator(CodeGenerator):
    """Generates code that spends a step in each block of statements, and charges for new texts."""

    def blockvisit(self, nodes: Any, frame: Any) -> None:
        self.writeline("environment.budget.spend()")
        super().blockvisit(nodes, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:  # noqa: N802 - a name of Jinja's visitor
        self.write("environment.concatenate((")
        for argument in node.nodes:
            self.visit(argument, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Any) -> None:  # noqa: N802
        self._charged(super().visit_List, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Any) -> None:  # noqa: N802
        if node.ctx == "load":
            self._charged(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Any) -> None:  # noqa: N802
        self._charged(super().visit_Dict, node, frame)

    def _charged(self, visit: Callable[[Any, Any], None], node: nodes.Node, frame: Any) -> None:
        self.write("environment.budget.container(")
        visit(node, frame)
        self.write(")")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with bounds for each rendering, which ``budget`` resumes and pauses."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        self.budget = _Budget()
        super().__init__(autoescape=False, finalize=self._printed, **options)
        self.filters.update(self._bounded_filters(dict(self.filters)))
        self.globals["dict"] = lambda *args, **kwargs: self.budget.container(dict(*args, **kwargs))

    def concat(self, texts: Iterable[str]) -> str:
        """Returns the concatenation of texts that statements write."""
        parts = []
        size = 0
        for text in texts:
            size += len(text)
            if size > MAX_SIZE:
                break
            parts.append(text)
        self.budget.charge(size)
        return "".join(parts)

    def concatenate(self, values: tuple[Any, ...]) -> str:
        """Returns the concatenation of values by the operator ``~``."""
        return self.concat([self.budget.text(value) for value in values])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Executes a binary operation if its result is small enough."""
        if operator == "+" and _sized(left) and _sized(right):
            self.budget.charge(len(left) + len(right))
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if _sized(value) and isinstance(times, int):
                    self.budget.charge(len(value) * times)
            if isinstance(left, int) and isinstance(right, int):
                self.budget.charge(left.bit_length() + right.bit_length())
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self.budget.charge(left.bit_length() * right)
        elif operator == "%" and isinstance(left, str):
            self._check_format(left)
            self.budget.container(right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in Jinja
        """Calls a function or method if its result is small enough."""
        of = getattr(__obj, "__self__", None)
        if isinstance(of, str):
            __self._check_method(of, getattr(__obj, "__name__", ""), (*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Returns the safe form of a text's method ``format``, with bounds; None for other values."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def formatted(*args: Any, **kwargs: Any) -> str:
            self._check_format(value.__self__)
            self.budget.container([args, kwargs])
            return self.budget.text(wrapped(*args, **kwargs))

        return formatted

    def _printed(self, value: Any) -> Any:
        if isinstance(value, list | tuple | Mapping):
            return self.budget.text(value)
        return value

    def _check_method(self, of: str, name: str, args: tuple[Any, ...]) -> None:
        if name in _PADDING:
            widths = [argument for argument in args if isinstance(argument, int)]
            self.budget.charge(len(of) + sum(widths) * (1 + of.count("\t")))
        elif name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
            self.budget.charge(len(of) + of.count(args[0]) * len(args[1]))
        elif name == "join" and args:
            self._check_join(of, args[0])
        elif name == "translate":
            raise TemplateTooExpensive("it calls translate, whose result has no bound")
        else:
            self.budget.charge(len(of))

    def _check_join(self, separator: str, values: Any) -> None:
        if not isinstance(values, list | tuple):
            raise TemplateTooExpensive("it joins what is not a list")
        self.budget.charge(sum(len(separator) + len(value) for value in values if isinstance(value, str)))

    @staticmethod
    def _check_format(text: str) -> None:
        if _UNBOUNDED_FORMAT.search(text):
            raise TemplateTooExpensive("it formats text with a long or computed width")

    def _bounded_filters(self, filters: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        """Returns replacements of the filters that can multiply their input."""
        budget = self.budget

        def indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
            each = len(width) if isinstance(width, str) else width
            budget.charge(len(s) + (s.count("\n") + 1) * each)
            return str(filters["indent"](s, width, first, blank))

        def center(value: Any, width: int = 80) -> str:
            budget.charge(width)
            return budget.text(value).center(width)

        def replace(value: Any, old: str, new: str, count: int = -1) -> str:
            text = budget.text(value)
            budget.charge(len(text) + text.count(str(old)) * len(str(new)))
            return text.replace(str(old), str(new), count)

        def join(value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
            items = list(value)
            if attribute is not None:
                items = [self.getitem(item, attribute) for item in items]
            budget.charge(len(d) * len(items))
            return self.concat([d.join([budget.text(item) for item in items])])

        def listed(value: Iterable[Any]) -> list[Any]:
            items = list(value)
            budget.charge(len(items))
            return items

        def formatted(value: str, *args: Any) -> str:
            self._check_format(str(value))
            budget.container(args)
            return budget.text(str(value) % args)

        def refused(*_: Any, **__: Any) -> None:
            raise TemplateTooExpensive("it uses a filter whose result has no bound")

        return {
            "indent": indent,
            "center": center,
            "replace": replace,
            "join": join,
            "list": listed,
            "string": budget.text,
            "format": formatted,
            **dict.fromkeys(("batch", "slice", "wordwrap", "urlize", "xmlattr", "pprint", "groupby"), refused),
        }


def _sized(value: Any) -> bool:
    return isinstance(value, str | list | tuple)
