"""Draws a text that matches a regular expression, in Python's notation."""

from __future__ import annotations

import re
import string
from random import Random
from typing import Any

from kvrouter.mocker.constrained.errors import Unsupported

_MORE = 4
"""Repetitions beyond the least ones."""
_CATEGORIES = {
    "CATEGORY_DIGIT": string.digits,
    "CATEGORY_SPACE": " ",
    "CATEGORY_WORD": string.ascii_letters + string.digits + "_",
    "CATEGORY_NOT_DIGIT": string.ascii_lowercase,
    "CATEGORY_NOT_SPACE": string.ascii_lowercase,
    "CATEGORY_NOT_WORD": " -.",
}
_ANY = string.ascii_letters + string.digits + " _-.,:"


def draw_match(pattern: str, random: Random) -> str:
    """Returns a text that the pattern matches as a whole.

    Raises:
        Unsupported: the pattern is invalid, or has what cannot be drawn, such as a look-ahead.
    """
    try:
        text = _Drawing(random).of(re._parser.parse(pattern))  # type: ignore[attr-defined]  # noqa: SLF001
        matches = re.fullmatch(pattern, text) is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise Unsupported(f"the regular expression is invalid: {error}") from None
    if not matches:
        raise Unsupported("the regular expression has parts that the simulated engine cannot draw")
    return text


class _Drawing:
    """Draws the parts of one match."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._groups: dict[int, str] = {}

    def of(self, parts: Any) -> str:
        return "".join(self._part(str(kind), value) for kind, value in parts)

    def _part(self, kind: str, value: Any) -> str:
        match kind:
            case "LITERAL":
                return chr(value)
            case "NOT_LITERAL":
                return self._random.choice(_ANY.replace(chr(value), ""))
            case "ANY":
                return self._random.choice(_ANY)
            case "IN":
                return self._random.choice(_members(value))
            case "BRANCH":
                return self.of(self._random.choice(value[1]))
            case "SUBPATTERN":
                group, _, _, parts = value
                text = self.of(parts)
                self._groups[group] = text
                return text
            case "GROUPREF":
                return self._groups.get(value, "")
            case "ATOMIC_GROUP":
                return self.of(value)
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                least, most, parts = value
                return "".join(self.of(parts) for _ in range(self._random.randint(least, min(most, least + _MORE))))
            case "AT":
                return ""
            case _:
                raise Unsupported(f"the simulated engine cannot draw {kind.lower()} of a regular expression")


def _members(parts: Any) -> str:
    """Returns the characters of a set; of a negated one those of a small alphabet that are not in it."""
    members = ""
    negated = False
    for kind, value in parts:
        match str(kind):
            case "NEGATE":
                negated = True
            case "LITERAL":
                members += chr(value)
            case "RANGE":
                members += "".join(map(chr, range(value[0], min(value[1], value[0] + 255) + 1)))
            case "CATEGORY":
                members += _CATEGORIES[str(value)]
    found = "".join(each for each in _ANY if each not in members) if negated else members
    if not found:
        raise Unsupported("the simulated engine finds no character of a set in a regular expression")
    return found
