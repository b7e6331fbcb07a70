"""Holds callers to the limits of their keys and tenants."""

from __future__ import annotations

import math

from kvrouter.frontend.access.caller import Caller, RateLimits
from kvrouter.frontend.access.limit_table import REQUESTS, TOKENS, LimitTable
from kvrouter.frontend.access.refusals import RefusalReason
from kvrouter.runtime.errors import RateLimited

_BURST_SECONDS = 1.0
"""Requests of so many seconds may arrive at once."""
_MINUTE_SECONDS = 60.0
_RETRY_SECONDS = 1.0
"""Time after which to retry a request beyond the concurrency: when another one ends is not known."""


class LimitReached(RateLimited):
    """A limit of the caller's key or tenant is reached."""

    def __init__(self, why: RefusalReason, message: str, seconds: float) -> None:
        super().__init__(message, max(1, math.ceil(seconds * 1000)))
        self.why = why


class Grant:
    """An admitted request. End it once."""

    __slots__ = ("_quotas", "_subjects", "_tokens")

    def __init__(self, quotas: Quotas, subjects: tuple[tuple[int, RateLimits], ...], tokens: int) -> None:
        self._quotas = quotas
        self._subjects = subjects
        self._tokens = tokens

    def end(self, tokens: int | None = None) -> None:
        """Ends the request.

        Args:
            tokens: Prompt and output tokens that it had; None if they are not known, and the estimate stands.
        """
        if self._subjects:
            self._quotas.end(self._subjects, 0 if tokens is None else self._tokens - tokens)


class Quotas:
    """The limits of all callers."""

    def __init__(self, table: LimitTable) -> None:
        self._table = table
        self._unlimited = Grant(self, (), 0)

    def admit(self, caller: Caller, tokens: int) -> Grant:
        """Admits a request, which then counts until its grant ends.

        Args:
            caller: Who makes it.
            tokens: Estimate of its prompt and output tokens.

        Raises:
            LimitReached: a limit is reached; nothing is counted then.
        """
        if caller.limits.limits_nothing and caller.tenant_limits.limits_nothing:
            return self._unlimited
        both = (f"key {caller.name}", caller.limits), (f"tenant {caller.tenant}", caller.tenant_limits)
        named = [(name, limits) for name, limits in both if not limits.limits_nothing]
        table = self._table
        subjects = tuple((table.row(name), limits) for name, limits in named)
        with table.locked():
            for (name, limits), (row, _) in zip(named, subjects, strict=True):
                self._check(name, row, limits, tokens)
            for row, limits in subjects:
                table.begin(row)
                if limits.requests_per_second is not None:
                    table.add(row, REQUESTS, 1.0, limits.requests_per_second)
                if limits.tokens_per_minute is not None:
                    table.add(row, TOKENS, tokens, limits.tokens_per_minute / _MINUTE_SECONDS)
        return Grant(self, subjects, tokens)

    def end(self, subjects: tuple[tuple[int, RateLimits], ...], unused_tokens: int) -> None:
        """Ends a request, and gives back the tokens that it did not use."""
        with self._table.locked():
            for row, limits in subjects:
                self._table.end(row)
                if unused_tokens and limits.tokens_per_minute is not None:
                    self._table.add(row, TOKENS, -unused_tokens, limits.tokens_per_minute / _MINUTE_SECONDS)

    def _check(self, name: str, row: int, limits: RateLimits, tokens: int) -> None:
        table = self._table
        if limits.concurrency is not None and table.running(row) >= limits.concurrency:
            raise LimitReached(
                RefusalReason.CONCURRENCY,
                f"the {name} has its maximum of {limits.concurrency} running requests",
                _RETRY_SECONDS,
            )
        per_second = limits.requests_per_second
        if per_second is not None:
            most = max(1.0, per_second * _BURST_SECONDS)
            if wait := table.wait_for(row, REQUESTS, 1.0, per_second, most):
                message = f"the {name} has used its {per_second:g} requests per second"
                raise LimitReached(RefusalReason.REQUEST_RATE, message, wait)
        per_minute = limits.tokens_per_minute
        if per_minute is not None and (
            wait := table.wait_for(row, TOKENS, tokens, per_minute / _MINUTE_SECONDS, per_minute)
        ):
            message = f"the {name} has used its {per_minute:g} tokens per minute"
            raise LimitReached(RefusalReason.TOKEN_RATE, message, wait)
