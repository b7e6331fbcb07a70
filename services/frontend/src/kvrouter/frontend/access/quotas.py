"""Holds callers to the limits of their keys and tenants."""

from __future__ import annotations

import math
from typing import NamedTuple

from kvrouter.frontend.access.caller import Caller, RateLimits
from kvrouter.frontend.access.limit_table import REQUESTS, TOKENS, LimitTable
from kvrouter.frontend.access.refusals import RefusalReason
from kvrouter.v1.errors import RateLimited

TOKEN_BYTES = 4
"""Bytes of a request standing for a token until its tokens are known: the typical length of one."""
_BURST_SECONDS = 1.0
"""Requests of so many seconds may arrive at once."""
_MINUTE_SECONDS = 60.0
_RETRY_SECONDS = 1.0
"""Time after which to retry a request beyond the concurrency: when another one ends is not known."""


class _Subject(NamedTuple):
    """A key or tenant with limits."""

    name: str
    row: int
    limits: RateLimits


class LimitReached(RateLimited):
    """A limit of the caller's key or tenant is reached."""

    def __init__(self, why: RefusalReason, message: str, seconds: float) -> None:
        super().__init__(message, max(1, math.ceil(seconds * 1000)))
        self.why = why


class Grant:
    """The part of its caller's limits taken by one request, from its arrival to its end.

    It counts as one running request with an estimate of its tokens, until its prompts are known. Then each of its
    sequences is a request with its own tokens.
    """

    __slots__ = ("_estimate", "_has_sequences", "_quotas", "_running", "_subjects")

    def __init__(self, quotas: Quotas, subjects: tuple[_Subject, ...], running: int, estimate: float) -> None:
        self._quotas = quotas
        self._subjects = subjects
        self._estimate = estimate
        self._running = running
        self._has_sequences = False

    def estimate(self, tokens: int) -> None:
        """Replaces the estimate, of which more is known now. If it exceeds the limit, further requests wait."""
        if not self._subjects:
            return
        estimate = self._quotas.countable(self._subjects, tokens)
        self._quotas.give_back(self._subjects, self._estimate - estimate)
        self._estimate = estimate

    def add_sequence(self, tokens: int, *, passes_empty: bool = True) -> None:
        """Counts the tokens of a sequence. Those of the first one replace the estimate.

        Args:
            tokens: Prompt and maximum output tokens.
            passes_empty: Whether more than the tokens of a minute fit if none are used.

        Raises:
            LimitReached: a limit is reached; nothing of the sequence is counted then.
        """
        if not self._subjects:
            return
        self._quotas.give_back(self._subjects, self._estimate)
        self._estimate = 0.0
        requests = int(self._has_sequences)
        running = 1 if self._has_sequences or not self._running else 0
        self._quotas.take(self._subjects, requests, running, tokens, passes_empty=passes_empty)
        self._has_sequences = True
        self._running += running

    def end_sequence(self, unused_tokens: int) -> None:
        """Gives the tokens back a sequence did not use."""
        self._quotas.give_back(self._subjects, unused_tokens)

    def handed_over(self) -> Grant:
        """Returns a grant with all of this one, which ends without effect."""
        grant = Grant(self._quotas, self._subjects, self._running, self._estimate)
        grant._has_sequences = self._has_sequences
        self._subjects = ()
        return grant

    def end(self) -> None:
        """Ends the request. Merely estimated tokens are given back."""
        subjects, self._subjects = self._subjects, ()
        if subjects:
            self._quotas.end(subjects, self._running, self._estimate)


class Quotas:
    """The limits of all callers."""

    def __init__(self, table: LimitTable) -> None:
        self._table = table
        self._unlimited = Grant(self, (), 0, 0.0)

    def admit(self, caller: Caller, tokens: int, *, runs: bool = True) -> Grant:
        """Admits a request, which then counts until its grant ends.

        Args:
            caller: Who makes it.
            tokens: Estimate of its prompt tokens.
            runs: Whether it counts as a running request from now on, and not only when it has a sequence.

        Raises:
            LimitReached: a limit is reached; nothing is counted then.
        """
        subjects = self._subjects(caller)
        if not subjects:
            return self._unlimited
        estimate = self.countable(subjects, tokens)
        self.take(subjects, 1, int(runs), estimate)
        return Grant(self, subjects, int(runs), estimate)

    def check(self, caller: Caller, *, runs: bool = True) -> None:
        """Checks that the limits of a caller leave room for a request, of which nothing is counted.

        Raises:
            LimitReached: they do not.
        """
        subjects = self._subjects(caller)
        if subjects:
            with self._table.locked():
                for subject in subjects:
                    self._check(subject, 1, int(runs), 0, passes_empty=True)

    def _subjects(self, caller: Caller) -> tuple[_Subject, ...]:
        if caller.limits.limits_nothing and caller.tenant_limits.limits_nothing:
            return ()
        both = (f"key {caller.name}", caller.limits), (f"tenant {caller.tenant}", caller.tenant_limits)
        return tuple(
            _Subject(name, self._table.row(name), limits) for name, limits in both if not limits.limits_nothing
        )

    def countable(self, subjects: tuple[_Subject, ...], tokens: int) -> float:
        """Returns how many tokens of an estimate count.

        It is at most the half of a minute's tokens: images take far more bytes than tokens, and a request that is
        larger than the tokens of a minute would wait until none are used.
        """
        return min(
            [
                tokens,
                *(each.limits.tokens_per_minute / 2 for each in subjects if each.limits.tokens_per_minute is not None),
            ]
        )

    def take(
        self, subjects: tuple[_Subject, ...], requests: int, running: int, tokens: float, *, passes_empty: bool = True
    ) -> None:
        """Counts new and running requests, and tokens.

        Raises:
            LimitReached: a limit is reached; nothing is counted then.
        """
        table = self._table
        with table.locked():
            for subject in subjects:
                self._check(subject, requests, running, tokens, passes_empty=passes_empty)
            for _, row, limits in subjects:
                table.begin(row, running)
                if requests and limits.requests_per_second is not None:
                    table.add(row, REQUESTS, requests, limits.requests_per_second)
                if limits.tokens_per_minute is not None:
                    table.add(row, TOKENS, tokens, limits.tokens_per_minute / _MINUTE_SECONDS)

    def give_back(self, subjects: tuple[_Subject, ...], tokens: float) -> None:
        """Gives tokens back; takes them, whatever the limit, if they are negative."""
        if not tokens:
            return
        with self._table.locked():
            self._give_back(subjects, tokens)

    def end(self, subjects: tuple[_Subject, ...], running: int, unused_tokens: float) -> None:
        """Ends running requests, and gives back the tokens they did not use."""
        with self._table.locked():
            for _, row, _ in subjects:
                self._table.end(row, running)
            self._give_back(subjects, unused_tokens)

    def _give_back(self, subjects: tuple[_Subject, ...], tokens: float) -> None:
        for _, row, limits in subjects:
            if tokens and limits.tokens_per_minute is not None:
                self._table.add(row, TOKENS, -tokens, limits.tokens_per_minute / _MINUTE_SECONDS)

    def _check(self, subject: _Subject, requests: int, running: int, tokens: float, *, passes_empty: bool) -> None:
        table = self._table
        name, row, limits = subject
        if running and limits.concurrency is not None and table.running(row) >= limits.concurrency:
            raise LimitReached(
                RefusalReason.CONCURRENCY,
                f"the {name} has its maximum of {limits.concurrency} running requests",
                _RETRY_SECONDS,
            )
        per_second = limits.requests_per_second
        if requests and per_second is not None:
            most = max(1.0, per_second * _BURST_SECONDS)
            if wait := table.wait_for(row, REQUESTS, requests, per_second, most):
                message = f"the {name} has used its {per_second:g} requests per second"
                raise LimitReached(RefusalReason.REQUEST_RATE, message, wait)
        per_minute = limits.tokens_per_minute
        if per_minute is None:
            return
        if tokens > per_minute and not passes_empty:
            message = f"{tokens:g} tokens are more than the {per_minute:g} tokens per minute of the {name}"
            raise LimitReached(RefusalReason.TOKEN_RATE, message, _MINUTE_SECONDS)
        if wait := table.wait_for(row, TOKENS, tokens, per_minute / _MINUTE_SECONDS, per_minute):
            message = f"the {name} has used its {per_minute:g} tokens per minute"
            raise LimitReached(RefusalReason.TOKEN_RATE, message, wait)
