"""The engines of all ranks as a server sees them: starts and aborts requests, and passes on their output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kvrouter.mocker.driver import EngineDriver, Tokens
from kvrouter.mocker.engine.types import EngineRequest, FinishReason

Receive = Callable[[Tokens], None]
"""Receives the output of one request. The last one has a finish reason."""


class NoSuchRank(ValueError):
    """The engine does not have the requested rank."""

    def __init__(self, dp_rank: int, ranks: int) -> None:
        super().__init__(f"data_parallel_rank {dp_rank} is out of range [0, {ranks}).")


@dataclass(frozen=True, slots=True)
class _Running:
    dp_rank: int
    driver: EngineDriver
    receive: Receive


class EngineService:
    """Routes requests to ranks and outputs to requests."""

    def __init__(self, drivers: Mapping[int, EngineDriver]) -> None:
        self.drivers = drivers
        self._running: dict[str, _Running] = {}

    @property
    def running(self) -> int:
        """Number of requests that have not ended."""
        return len(self._running)

    def start(self, request: EngineRequest, dp_rank: int | None, receive: Receive) -> int:
        """Starts a request, on the rank with the fewest requests if none is given; returns the rank.

        Raises:
            NoSuchRank: there is no such rank.
            RequestRefused: the engine refuses the request.
        """
        rank = self._idlest() if dp_rank is None else dp_rank
        driver = self.drivers.get(rank)
        if driver is None:
            raise NoSuchRank(rank, len(self.drivers))
        driver.submit(request)
        self._running[request.request_id] = _Running(rank, driver, receive)
        return rank

    def cancel(self, request_id: str, receive: Receive) -> None:
        """Ends the request with this receiver, unless it has ended; a later one with the same id continues."""
        running = self._running.get(request_id)
        if running is not None and running.receive is receive:
            del self._running[request_id]
            running.driver.abort(request_id)

    def abort(self, request_ids: Iterable[str]) -> int:
        """Ends requests, whose receivers get a last output without tokens; returns how many were running."""
        ended = 0
        for request_id in request_ids:
            running = self._running.pop(request_id, None)
            if running is not None:
                running.driver.abort(request_id)
                running.receive(Tokens(finish_reason=FinishReason.ABORT))
                ended += 1
        return ended

    def request_ids(self) -> list[str]:
        """Returns the ids of the requests that have not ended."""
        return list(self._running)

    def emit(self, outputs: list[tuple[str, Tokens]]) -> None:
        """Passes the outputs of a step to their receivers."""
        for request_id, tokens in outputs:
            running = self._running.get(request_id)
            if running is None:
                continue
            if tokens.finish_reason is not None:
                del self._running[request_id]
            running.receive(tokens)

    def _idlest(self) -> int:
        running = Counter(each.dp_rank for each in self._running.values())
        return min(self.drivers, key=lambda rank: running[rank])
