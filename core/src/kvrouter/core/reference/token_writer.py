"""Writes single tokens of a worker's output to a client."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable
from typing import Protocol

from kvrouter.core.reference.observations import Observations
from kvrouter.core.reference.outputs import read_output


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


class TokenWriter:
    """Writes events of one client that differ only in a token, which it reads from a worker's pieces of output.

    Single tokens skip the steps that other pieces pass through. ``taken`` returns them later, to be counted together.
    """

    def __init__(
        self,
        pending: dict[asyncio.Transport, list[bytes]],
        wake: Callable[[], object],
        transport: asyncio.Transport,
        protocol: Client,
        before: bytes,
        after: bytes,
        *,
        are_chunks: bool,
    ) -> None:
        """Takes nothing before ``begin``.

        Args:
            pending: Where events are added, by client.
            wake: Called when the first one is.
            transport: The client.
            protocol: Says whether it reads.
            before: The bytes of an event before its token.
            after: Those after it.
            are_chunks: Whether each event is a chunk of an HTTP response.
        """
        self._pending = pending
        self._wake = wake
        self._transport = transport
        self._protocol = protocol
        self._before = before
        self._after = after
        self._are_chunks = are_chunks
        self._latency: Observations | None = None
        self.worker: Worker | None = None
        """Whose tokens it takes, and counts; None to take none."""
        self.limit = 0
        """Number of tokens that it may yet take."""
        self.last_ns = 0
        """Time of the latest token, by ``time.perf_counter_ns``."""
        self.total = 0
        """Number of tokens taken so far."""
        self._taken = array("I")

    def begin(self, limit: int, last_ns: int, latency: Observations) -> None:
        """Lets it take tokens.

        Args:
            limit: Number of tokens that it may take.
            last_ns: Time of the token before, by ``time.perf_counter_ns``.
            latency: Observes the time between tokens, seconds.
        """
        self.limit, self.last_ns, self._latency = limit, last_ns, latency

    def take(self, response: bytes) -> bool:
        """Takes the token of an encoded WorkerServiceGenerateResponse that has nothing else, and writes its event.

        Returns False, and does nothing, if there is anything else to do, or while the client does not read.
        """
        plain, worker = read_output(response), self.worker
        if not self.limit or self._latency is None or worker is None or plain is None:
            return False
        if self._protocol.writing_paused or worker.missed:
            return False
        token_ids, finish_reason, cached_tokens = plain
        if len(token_ids) != 1 or finish_reason or cached_tokens is not None:
            return False
        self._write(*token_ids)
        worker.pieces += 1
        now_ns = time.perf_counter_ns()
        self._latency.observe((now_ns - self.last_ns) / 1e9)
        self.last_ns = now_ns
        self.limit -= 1
        self.total += 1
        self._taken.extend(token_ids)
        return True

    def taken(self) -> tuple[int, bytes]:
        """Returns the number of tokens taken since it was last asked, and the tokens as packed little-endian u32."""
        taken, self._taken = self._taken, array("I")
        return len(taken), taken.tobytes()

    def _write(self, token: int) -> None:
        event = b"%b%d%b" % (self._before, token, self._after)
        if self._are_chunks:
            event = b"%x\r\n%b\r\n" % (len(event), event)
        if not self._pending:
            self._wake()
        self._pending.setdefault(self._transport, []).append(event)
