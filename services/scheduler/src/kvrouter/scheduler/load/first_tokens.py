"""Requests whose first token will show how fast their rank is."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

MAX_EXPECTED = 1 << 16
"""Most requests without a first token; beyond it the oldest are dropped."""

_T = TypeVar("_T")


class FirstTokens(Generic[_T]):
    """Has what is expected of each dispatched request until its first token, by the key of its booking."""

    def __init__(self) -> None:
        self._expected: dict[Hashable, _T] = {}

    def forget(self, key: Hashable) -> None:
        """Drops a request without a first token."""
        self._expected.pop(key, None)

    def _expect(self, key: Hashable, expected: _T) -> None:
        if len(self._expected) >= MAX_EXPECTED:
            del self._expected[next(iter(self._expected))]
        self._expected[key] = expected
