"""Decides whether a request whose worker failed gets a further attempt, or waits until its pool has restarted.

It also says which requests with output can continue on another worker.
"""

from __future__ import annotations

import asyncio
import json

import msgspec
from kvrouter.frontend.generate_request import Sampling
from kvrouter.frontend.workers.failures import WorkerFailure
from kvrouter.net.backoff import Backoff
from kvrouter.runtime.deadline import Deadline

_STRUCTURED = frozenset(
    {
        *("structured_outputs", "guided_decoding", "response_format", "json_schema", "regex", "ebnf", "structural_tag"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    }
)
"""Options of engines for structured output. Its grammar begins anew on another worker, in the middle of the output."""


def migration_blocker(sampling: Sampling) -> str:
    """Returns why a request with output cannot continue on another worker; empty if it can."""
    if sampling.n is not None and sampling.n > 1:
        return f"it has {sampling.n} sequences"
    if sampling.structured_output is not None:
        return "its output is structured"
    if not sampling.engine_options_json:
        return ""
    try:
        options = json.loads(sampling.engine_options_json)
    except (ValueError, RecursionError):
        return "its engine options cannot be read"
    used = sorted(_STRUCTURED & options.keys()) if isinstance(options, dict) else []
    return f"its output is structured ({', '.join(used)})" if used else ""


def is_inexact(sampling: Sampling) -> bool:
    """Returns whether the output of another worker may differ: the state of a seed or a penalty begins anew."""
    return (
        sampling.seed is not None
        or bool(sampling.frequency_penalty or sampling.presence_penalty)
        or sampling.repetition_penalty not in (None, 1)
    )


_MAX_NOT_TAKEN = 16
"""Attempts that their worker does not take and that cost nothing; bounds the changes between pools of such workers."""


class AttemptBudget(msgspec.Struct, kw_only=True):
    """Counts the failures of one request: attempts without output, and migrations.

    A failure without output costs an attempt, and the request is retried. A failure after output costs a migration: the
    request continues on another worker, with a new set of attempts. A worker that cannot be reached, or is stopping,
    costs nothing: the request has not failed there, and several may be gone before their registrations end. Nor does
    one an operator drains. Deaths of workers are counted besides, by ``RequestDeaths``.
    """

    max_attempts: int
    """Maximum number of attempts in a row without output."""
    migration_limit: int
    """Maximum number of migrations."""
    pinned: bool
    """Whether one worker alone may serve the request."""
    migration_blocker: str = ""
    """Why the request cannot migrate once it has output; empty if it can."""
    migrations: int = 0
    """Migrations so far, those from drained workers included."""
    silent_worker_id: int | None = None
    """Worker the latest attempt left because it stopped answering."""
    failed_attempts: int = 0
    """Failed attempts since the last output. A repeated return to the same silent worker does not count: the
    Scheduler may discover another worker later than this Frontend does."""
    failed_migrations: int = 0
    """Migrations that count against the limit."""
    not_taken: int = 0
    """Attempts in a row that no worker took."""

    def allows(self, *, with_output: bool, is_drained: bool = False) -> bool:
        """Returns whether a further attempt may follow if the running one fails with or without output.

        ``is_drained``: whether it ends because its worker is drained.
        """
        if with_output:
            return not self.migration_refusal(is_drained=is_drained)
        return not self.pinned and self.failed_attempts + 1 < self.max_attempts

    def allows_after(self, failure: WorkerFailure, *, with_output: bool) -> bool:
        """Returns whether a further attempt may follow a failure of the running one."""
        allowed = self.allows(with_output=with_output, is_drained=failure.is_drained)
        return allowed or (not with_output and self._is_free(failure))

    def _is_free(self, failure: WorkerFailure) -> bool:
        return failure.not_taken and not self.pinned and self.not_taken < _MAX_NOT_TAKEN

    def waited(self) -> None:
        """Records that the request has waited for its workers to start again: all may be tried anew."""
        self.not_taken = 0

    def migration_refusal(self, *, is_drained: bool = False) -> str:
        """Returns why the request cannot migrate; empty if it can."""
        if not self.migration_limit:
            return "its migration limit is 0"
        if self.pinned:
            return "the request is pinned to its worker"
        if self.migration_blocker:
            return self.migration_blocker
        if not is_drained and self.failed_migrations >= self.migration_limit:
            return f"it has migrated {self.failed_migrations} times, its limit"
        return ""

    def failed(self, failure: WorkerFailure, *, with_output: bool) -> None:
        """Counts a failed attempt before another one."""
        if with_output:
            self.migrations += 1
            self.failed_migrations += not failure.is_drained
            self.failed_attempts = 0
        elif self._is_free(failure):
            self.not_taken += 1
        elif failure.worker_id != self.silent_worker_id:
            self.failed_attempts += 1
        self.silent_worker_id = failure.worker_id if failure.is_silent else None


_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 1.0


class RestartWait:
    """Waits between the attempts of one request, for a limited time in sum."""

    def __init__(self, limit_seconds: float) -> None:
        """Has not waited yet. ``limit_seconds`` is the longest time to wait in sum."""
        self.limit_seconds = limit_seconds
        self.has_lost_workers = False
        """Whether a worker died with the request, refused the connection or was stopping, so it may start again."""
        self._waited = 0.0
        self._pauses = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)

    def failed(self, failure: WorkerFailure) -> None:
        """Notes why an attempt failed."""
        died = failure.fate is not None and failure.fate.died
        self.has_lost_workers = self.has_lost_workers or failure.not_taken or died

    async def pause(self, deadline: Deadline) -> bool:
        """Waits a moment. Returns False, at once, if the time for waiting or the request's deadline is over."""
        left = self.limit_seconds - self._waited
        if (until_answer := deadline.before_answer()) is not None:
            left = min(left, until_answer)
        if left <= 0:
            return False
        pause = min(self._pauses.failed(), left)
        self._waited += pause
        await asyncio.sleep(pause)
        return True
