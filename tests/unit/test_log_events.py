"""Log events are named component.event, and each is in the reference with its level and fields."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for part in ("net", "services/*", "core")
    for path in ROOT.glob(f"{part}/src/kvrouter/**/*.py")
    if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
)
PAGE = ROOT / "docs" / "reference" / "log-events.md"
LEVELS = {
    "debug": "debug",
    "info": "info",
    "warning": "warning",
    "error": "error",
    "exception": "error",
    "critical": "error",
}
NOT_FIELDS = frozenset({"exc_info"})


@dataclass
class Event:
    """What the sources log under one name."""

    levels: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)


def logged() -> dict[str, Event]:
    """Every event of the sources."""
    events: dict[str, Event] = {}
    for path in SOURCES:
        for call, level, name in calls(ast.parse(path.read_text(encoding="utf-8"))):
            event = events.setdefault(name, Event())
            event.levels.add(level)
            event.fields.update(each.arg for each in call.keywords if each.arg and each.arg not in NOT_FIELDS)
    return events


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str, str]]:
    """Each call of a logger in a module, with its level and the event's name."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_logger(node.func.value)):
            continue
        if node.func.attr in LEVELS:
            for name in names_in(node.args[0]):
                yield node, LEVELS[node.func.attr], name


def is_logger(node: ast.expr) -> bool:
    """Whether an expression is a logger: ``log``, ``self._log``, ``log.bind(...)``."""
    if isinstance(node, ast.Name | ast.Attribute):
        return (node.id if isinstance(node, ast.Name) else node.attr) in {"log", "_log", "logger", "_logger"}
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_logger(node.func.value)


def names_in(node: ast.expr) -> list[str]:
    """The names that an argument may have: a literal, or a choice between literals."""
    if isinstance(node, ast.IfExp):
        return [*names_in(node.body), *names_in(node.orelse)]
    assert isinstance(node, ast.Constant), f"not a literal: {ast.unparse(node)}"
    return [str(node.value)]


def listed() -> dict[str, Event]:
    """Every event of the page."""
    rows = re.findall(r"^\| `([^`]+)` \| ([a-z, ]+) \| ([^|]*) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {
        name: Event({level.strip() for level in levels.split(",")}, set(re.findall(r"`(\w+)`", fields)))
        for name, levels, fields in rows
    }


def test_events_are_named_by_component_and_event() -> None:
    assert not [name for name in logged() if not re.fullmatch(r"[a-z0-9_]+\.[a-z0-9_]+", name)]


def test_every_event_is_in_the_reference() -> None:
    assert listed() == logged()
