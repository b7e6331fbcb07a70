"""Detects a worker which accepts requests and answers probes, but generates nothing, or a small part as before.

A worker is compared with itself: with the rate of its output, and with the time its prompts took. A fixed timeout
would stop slow engines, or notice a hung one late.
"""

from __future__ import annotations

import msgspec

_SLOWDOWN = 20.0
"""A worker with less than this part of its usual output per request is stalled, after the time it is allowed."""
_HEALTHY_SHARE = 0.25
"""Share of the usual output per request that shows soon after a pause of a worker without a stall."""
_HEALTHY_PIECES = 2.0
"""Pieces per request at that rate ending a pause. One piece is a single step of the engine, however long it took."""
_MARGIN = 3.0
"""Factor on everything learned: pauses, waits, and time per prompt token."""
_MIN_EXPECTED_PIECES = 20.0
"""Pieces of output a worker must owe, so a slow engine with one request is not judged by chance."""
_LEARNING_RATE = 1 / 32
_MEMORY = 0.995
"""Factor with which the longest pause and wait fade in each interval with output."""
_FASTEST_SECONDS_PER_TOKEN = 0.0003
"""Time per prompt token every worker is allowed: prompts found in the cache teach nothing about others."""
_UNKNOWN_SECONDS_PER_TOKEN = 0.001
"""Time per prompt token a worker is allowed for a backlog of a size it has not had."""
_SIMILAR_BACKLOG = 4
"""Factor up to which a larger backlog is similar to one the worker has had."""
_MIN_BACKLOG_TOKENS = 4096
"""Prompt tokens below which the wait for a first token is mostly constant."""
_UNPROVEN_SECONDS = 60.0
"""Time allowed to a worker without any output so far: its engine may compile kernels."""


class MonitoredRequest(msgspec.Struct):
    """A request at a worker."""

    prompt_tokens: int
    began: float
    """Time of its dispatch, seconds."""
    backlog_tokens: int
    """Prompt tokens that waited at the worker when it was dispatched, its own included."""
    is_typical: bool = True
    """Whether its wait tells what is usual: not if the worker was stalled when it was dispatched."""
    has_output: bool = False


class StallDetector:
    """The output of one worker, over the requests of this Frontend. ``interval_ended`` returns the verdicts."""

    def __init__(self, min_seconds: float) -> None:
        """``min_seconds`` is the least time without progress making a worker stalled."""
        self._min_seconds = min_seconds
        self._generating = 0
        """Requests with output."""
        self._waiting = 0
        self._backlog_tokens = 0
        """Prompt tokens of requests without output."""
        self.pieces = 0
        """Pieces of output in this interval, to be set before it ends."""
        self._usual_rate: float | None = None
        """Usual pieces per second of a request with output."""
        self._seconds_per_token: float | None = None
        self._largest_backlog = 0
        self._longest_wait = 0.0
        self._longest_pause = 0.0
        self._generating_before = 0
        self._requests_before = 0
        self._is_stalled = False
        """Whether the last verdict was that it is stalled. Until it generates again, nothing is learned."""
        self._pause = 0.0
        """Seconds since an interval with progress."""
        self._pause_allowed = 0.0
        """Longest time allowed during the pause: a prompt ending it explains all of it."""
        self._pause_pieces = 0
        self._pause_request_seconds = 0.0
        self._healthy_pieces = 0.0
        """Pieces per request since the output was last too slow."""

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to observe: no requests, in the last interval neither, and no output."""
        running = self._generating or self._waiting
        return not (running or self.pieces or self._requests_before or self._generating_before)

    def began(self, prompt_tokens: int, now: float) -> MonitoredRequest:
        """Adds a request; ``ended`` must follow."""
        self._waiting += 1
        self._backlog_tokens += prompt_tokens
        return MonitoredRequest(prompt_tokens, now, self._backlog_tokens, is_typical=not self._is_stalled)

    def first_output(self, request: MonitoredRequest, now: float) -> None:
        """Records the first output of a request."""
        self._end_wait(request)
        request.has_output = True
        self._generating += 1
        if not request.is_typical:
            return
        waited = now - request.began
        per_token = waited / max(request.backlog_tokens, _MIN_BACKLOG_TOKENS)
        self._seconds_per_token = max(per_token, (self._seconds_per_token or 0.0) * _MEMORY)
        self._largest_backlog = max(request.backlog_tokens, self._largest_backlog)
        self._longest_wait = max(waited, self._longest_wait * _MEMORY)

    def ended(self, request: MonitoredRequest) -> None:
        """Removes a request."""
        if request.has_output:
            self._generating -= 1
        else:
            self._end_wait(request)

    def interval_ended(self, seconds: float) -> bool | None:
        """Ends an interval of observation.

        Returns:
            True if the worker is stalled, False if it made progress, None if nothing is known. After True the
            observation begins anew.
        """
        pieces, self.pieces = self.pieces, 0
        generating = min(self._generating_before, self._generating)
        requests = min(self._requests_before, self._generating + self._waiting)
        self._generating_before, self._requests_before = self._generating, self._generating + self._waiting
        if self._makes_progress(pieces, generating, seconds):
            self._end_pause(learn=not self._is_stalled)
            self._is_stalled = False
            return False
        if not requests:
            self._end_pause(learn=False)
            return None
        self._pause += seconds
        self._pause_pieces += pieces
        self._pause_request_seconds += generating * seconds
        self._pause_allowed = max(self._pause_allowed, self._allowed_seconds())
        if self._pause < self._pause_allowed or self._owed_pieces() < _MIN_EXPECTED_PIECES:
            return None
        self._end_pause(learn=False)
        self._is_stalled = True
        return True

    def _makes_progress(self, pieces: int, generating: int, seconds: float) -> bool:
        if not pieces:
            self._healthy_pieces = 0.0
            return False
        if not generating:
            return True
        rate = pieces / (generating * seconds)
        usual = self._usual_rate
        if usual is None:
            self._usual_rate = rate
            return True
        self._healthy_pieces = self._healthy_pieces + pieces / generating if rate >= usual * _HEALTHY_SHARE else 0.0
        if self._healthy_pieces < _HEALTHY_PIECES:
            over_pause = (self._pause_pieces + pieces) / (self._pause_request_seconds + generating * seconds)
            if over_pause < usual / _SLOWDOWN:
                return False
        self._usual_rate = usual + (rate - usual) * _LEARNING_RATE
        return True

    def _allowed_seconds(self) -> float:
        per_token = self._seconds_per_token
        if per_token is None:
            return max(_UNPROVEN_SECONDS, _MARGIN * _UNKNOWN_SECONDS_PER_TOKEN * self._backlog_tokens)
        is_similar = self._backlog_tokens <= _SIMILAR_BACKLOG * self._largest_backlog
        least = _FASTEST_SECONDS_PER_TOKEN if is_similar else _UNKNOWN_SECONDS_PER_TOKEN
        prompts = max(per_token, least) * self._backlog_tokens if self._waiting else 0.0
        wait = 0.0 if self._generating else self._longest_wait
        return max(self._min_seconds, _MARGIN * max(prompts, wait, self._longest_pause))

    def _owed_pieces(self) -> float:
        """Returns how many pieces the requests with output would usually have had in the pause; enough without any."""
        if not self._pause_request_seconds or self._usual_rate is None:
            return _MIN_EXPECTED_PIECES
        return self._usual_rate * self._pause_request_seconds

    def _end_pause(self, *, learn: bool) -> None:
        if learn:
            self._longest_pause = max(self._pause, self._longest_pause * _MEMORY)
        self._pause = self._pause_request_seconds = self._pause_allowed = 0.0
        self._pause_pieces = 0

    def _end_wait(self, request: MonitoredRequest) -> None:
        self._waiting -= 1
        self._backlog_tokens -= request.prompt_tokens
