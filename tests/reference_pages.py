"""Reads the tables of docs/reference."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from kvrouter.v1 import errors
from kvrouter.v1.errors import KvRouterError

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
TYPES = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, KvRouterError) and kind is not KvRouterError
}
"""The error types by name."""


def section(page: str, heading: str) -> str:
    """The text of a section of a page."""
    text = (REFERENCE / page).read_text(encoding="utf-8")
    return text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def rows(text: str) -> list[list[str]]:
    """The rows of the tables in a text, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [
        row for row, below in zip(cells, [*cells[1:], [""]], strict=True) if not is_rule(row) and not is_rule(below)
    ]


def is_rule(row: list[str]) -> bool:
    return all(set(cell) == {"-"} for cell in row)


def named(text: str) -> set[str]:
    """The error types that a text names."""
    return set(re.findall(r"`(\w+)`", text)) & set(TYPES)


def errors_of_calls(service: str) -> dict[str, set[str]]:
    """The error types of each call of a service, by the name of its method in Python."""
    return {
        re.sub(r"(?<!^)(?=[A-Z])", "_", call.strip("`")).lower(): named(types)
        for call, types, *_ in rows(section("errors.md", service))
    }
