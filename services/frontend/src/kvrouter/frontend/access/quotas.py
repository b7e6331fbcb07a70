"""Holds callers to the limits of their keys and tenants, counted in memory the processes of a Frontend share.

Each key and tenant with a limit has a row: two rates and the running requests of each process. A rate is a leaky
bucket: ``used`` drains at the permitted rate, and a request is admitted if its amount fits. A row of zeros is
unused.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import blake2b
from typing import BinaryIO, NamedTuple

from kvrouter.frontend.access.caller import Caller, RateLimits
from kvrouter.frontend.access.refusals import RefusalReason
from kvrouter.v1.errors import RateLimited

_ROWS = 16_384
"""Rows. Further keys share the row of another one, whose limits then hold for both."""
_WORD_BYTES = 8
_RUNNING = 5
"""Index in a row of the running requests of the first process, after the digest and two rates of two words."""
REQUESTS, TOKENS = 1, 3
"""Index in a row of the two rates."""


def table_bytes(processes: int) -> int:
    """Returns the size of the table of so many processes."""
    return _ROWS * (_RUNNING + processes) * _WORD_BYTES


@contextmanager
def shared_file(processes: int) -> Iterator[BinaryIO]:
    """Yields a file without a name, for the table of so many processes."""
    with tempfile.TemporaryFile() as file:
        os.ftruncate(file.fileno(), table_bytes(processes))
        yield file


class _FileLock:
    """A lock between processes; within one process it excludes nobody."""

    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN)


class LimitTable:
    """The table, as one process sees it."""

    def __init__(
        self, descriptor: int = -1, process: int = 0, processes: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Opens the table; requests an earlier process of that number ran are not counted any more.

        Args:
            descriptor: The shared file; -1 for a table of this process alone.
            process: Number of this process, from 0.
            processes: Number of processes.
            clock: Returns seconds, the same in all processes.
        """
        memory = memoryview(mmap.mmap(descriptor, table_bytes(processes)))
        self._words = memory.cast("Q")
        self._reals = memory.cast("d")
        self._width = _RUNNING + processes
        self._own = _RUNNING + process
        self._locked: AbstractContextManager[object] = _FileLock(descriptor) if processes > 1 else nullcontext()
        self._clock = clock
        self._rows: dict[str, int] = {}
        with self.locked():
            for index in range(self._own, len(self._words), self._width):
                if self._words[index]:
                    self._words[index] = 0

    def locked(self) -> AbstractContextManager[object]:
        """Keeps the other processes away while the context lasts, for microseconds. A process that dies releases it."""
        return self._locked

    def row(self, name: str) -> int:
        """Returns the row of a key or tenant, which is made at its first use."""
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = self._find(name)
        return row

    def _find(self, name: str) -> int:
        digest = int.from_bytes(blake2b(name.encode(), digest_size=_WORD_BYTES).digest(), "little") or 1
        with self.locked():
            for step in range(_ROWS):
                row = (digest + step) % _ROWS * self._width
                if self._words[row] in (0, digest):
                    self._words[row] = digest
                    return row
        return digest % _ROWS * self._width

    def wait_for(self, row: int, rate: int, amount: float, per_second: float, most: float) -> float:
        """Returns the seconds until an amount fits into a rate; 0 if it fits now.

        Args:
            row: The row.
            rate: REQUESTS or TOKENS.
            amount: The amount to add; more than ``most`` fits into an unused rate.
            per_second: The permitted rate.
            most: Maximum use at once.
        """
        used = self._drained(row, rate, per_second)
        return max(0.0, used + min(amount, most) - most) / per_second

    def add(self, row: int, rate: int, amount: float, per_second: float) -> None:
        """Adds an amount to a rate, or takes it back if it is negative."""
        used = self._drained(row, rate, per_second)
        self._reals[row + rate] = max(0.0, used + amount)
        self._reals[row + rate + 1] = self._clock()

    def running(self, row: int) -> int:
        """Returns the running requests of all processes."""
        return self._words[row + self._own] if self._width == _RUNNING + 1 else sum(self._row_of_running(row))

    def _row_of_running(self, row: int) -> memoryview[int]:
        return self._words[row + _RUNNING : row + self._width]

    def begin(self, row: int, requests: int = 1) -> None:
        """Counts running requests of this process."""
        self._words[row + self._own] += requests

    def end(self, row: int, requests: int = 1) -> None:
        """Ends running requests of this process."""
        self._words[row + self._own] -= requests

    def _drained(self, row: int, rate: int, per_second: float) -> float:
        since = max(0.0, self._clock() - self._reals[row + rate + 1])
        return max(0.0, self._reals[row + rate] - since * per_second)


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

    def begin_again(self) -> None:
        """Lets the next sequences take the place of those so far, since another model serves the request."""
        ended = max(0, self._running - 1)
        if self._subjects and ended:
            self._quotas.give_back(self._subjects, 0.0, running=ended)
            self._running -= ended
        self._has_sequences = False

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
            self._quotas.give_back(subjects, self._estimate, running=self._running)


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

    def give_back(self, subjects: tuple[_Subject, ...], tokens: float, *, running: int = 0) -> None:
        """Gives tokens back, or takes them, whatever the limit, if they are negative. Ends running requests."""
        if not (tokens or running):
            return
        with self._table.locked():
            for _, row, limits in subjects:
                self._table.end(row, running)
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
