"""Results of checks, as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Outcome = Literal["passed", "failed", "skipped"]

_WIDTH = 120
_NAME_WIDTH = 18
_INDENT = " " * (_NAME_WIDTH + 10)


class CheckFailed(Exception):
    """The worker violates the contract."""

    def __init__(self, *, expected: str, received: str, advice: str) -> None:
        super().__init__(f"expected {expected}, received {received}: {advice}")
        self.expected = expected
        self.received = received
        self.advice = advice


class CheckSkipped(Exception):
    """The check cannot be made; the message says why, and how it could be."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check."""

    name: str
    outcome: Outcome
    received: str = ""
    """Observed behaviour, or why the check was skipped."""
    expected: str = ""
    """Behaviour by the contract; set if it failed."""
    advice: str = ""
    """Correction; set if it failed."""


def as_text(results: Iterable[CheckResult]) -> str:
    """Returns a line for each check, and for failed ones the expected and received behaviour and the correction."""
    lines: list[str] = []
    for each in results:
        head = f"{each.outcome:8}  {each.name:{_NAME_WIDTH}}"
        if each.outcome == "failed":
            lines += _wrapped(head, f"expected {each.expected}")
            lines += _wrapped("", f"received {each.received}")
            lines += _wrapped("", f"to do: {each.advice}")
        else:
            lines += _wrapped(head, each.received)
    return "\n".join(lines)


def as_json(worker: str, results: Iterable[CheckResult]) -> dict[str, Any]:
    """Returns the results as a JSON object."""
    listed = [asdict(each) for each in results]
    return {"worker": worker, "passed": all(each["outcome"] != "failed" for each in listed), "checks": listed}


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=f"{head:{len(_INDENT)}}" if head else _INDENT, subsequent_indent=_INDENT
    ) or [head]
