"""What writers of a worker's output share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from kvrouter.core.reference.observations import Observations


class Client(Protocol):
    """Knows whether a client reads."""

    @property
    def writing_paused(self) -> bool:
        """Whether it leaves output unread."""


class Worker(Protocol):
    """Counts what a worker sends."""

    pieces: int
    """Pieces of output it has sent."""
    missed: int
    """Unanswered probes. Its next piece, which shows that it answers, is left to others."""


class OutputWriter(ABC):
    """Writes pieces of a worker's output that have only tokens to a client.

    They skip the steps that other pieces pass through. ``taken`` returns their tokens later, to be counted together.
    """

    def __init__(self, protocol: Client) -> None:
        """Takes nothing before ``begin``. ``protocol`` says whether the client reads."""
        self._protocol = protocol
        self._latency: Observations | None = None
        self._report: Callable[[int], int] | None = None
        self._room = 0
        self._tokens = 0
        self.worker: Worker | None = None
        """Whose pieces it takes, and counts; None to take none."""
        self.limit = 0
        """Number of tokens that it may yet take."""
        self.last_ns = 0
        """Time of the latest token, by ``time.perf_counter_ns``."""

    def begin(self, room: int, last_ns: int, latency: Observations, report: Callable[[int], int]) -> None:
        """Lets it take tokens, up to its limit, until ``taken``.

        Args:
            room: Number of tokens that need no report.
            last_ns: Time of the token before, by ``time.perf_counter_ns``.
            latency: Observes the time between tokens, seconds.
            report: Called with the number of tokens taken, once there is no room for them. Returns the next room, which
                includes these tokens.
        """
        self._room, self.last_ns, self._latency, self._report = room, last_ns, latency, report

    @abstractmethod
    def take(self, piece: bytes) -> bool:
        """Writes a piece as it was received.

        Returns False, and does nothing, if there is anything else to do, or while the client does not read.
        """

    @abstractmethod
    def taken(self) -> tuple[int, bytes]:
        """Returns the number of tokens taken since ``begin``, and their ids, packed, if it knows them."""

    def _end(self) -> int:
        """Takes no further tokens. Returns the number of those taken."""
        tokens, self._tokens = self._tokens, 0
        self._latency = self._report = None
        return tokens

    def _may_take(self, tokens: int) -> bool:
        """Returns whether it may take a piece of so many tokens."""
        if self._latency is None or self.worker is None or not 0 < tokens <= self.limit:
            return False
        return not (self._protocol.writing_paused or self.worker.missed)

    def _count(self, tokens: int) -> None:
        """Counts a piece of so many tokens, which ``_may_take`` allowed."""
        assert self._latency and self._report and self.worker, "else nothing is taken"  # noqa: S101, PT018
        self.worker.pieces += 1
        now_ns = time.perf_counter_ns()
        self._latency.observe((now_ns - self.last_ns) / 1e9, tokens)
        self.last_ns = now_ns
        self.limit -= tokens
        self._tokens += tokens
        if self._tokens > self._room:
            self._room = self._report(self._tokens)
