"""The prefill engines of a simulation, and the transfers of the blocks that they have computed.

A transfer takes the time of the Scheduler's model of the link, and no computing time. Blocks that are being transferred
take no room at the prefill engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import heappop, heappush

from kvrouter.core import Rank
from kvrouter.runtime.kv_transfer import KvTransfer
from kvrouter.scheduler.request.prompt import Prompt
from kvrouter.simulator.engines.fleet import Notice
from kvrouter.simulator.routing.replicas import Schedulers


class PrefillPool:
    """Routes prompts among prefill engines, and times their transfers."""

    def __init__(self, schedulers: Schedulers, engine_of: Mapping[Rank, int], transfer: KvTransfer) -> None:
        """``engine_of`` has the engine of each rank; ``transfer`` is the link to the decode engines."""
        self._schedulers = schedulers
        self._engine_of = engine_of
        self._transfer = transfer
        self._tokens: dict[int, int] = {}
        """Prompt tokens to transfer, by request."""
        self._under_way: list[tuple[float, int]] = []
        """Heap of (time at which a transfer ends, request)."""

    def begin(self, number: int, prompt: Prompt, tokens: int, now: float) -> int | None:
        """Returns the engine that computes a prompt, of which ``tokens`` are transferred; None if it is queued.

        Raises:
            AllBusy: all prefill engines are above their busy thresholds.
        """
        rank = self._schedulers.route(number, prompt, now)
        self._tokens[number] = tokens
        return None if rank is None else self._engine_of[rank]

    def release(self, now: float) -> Iterator[tuple[int, int | None]]:
        """Yields queued requests that go now, and their engines, None if all are busy. Send each before the next."""
        for number, rank in self._schedulers.release(now):
            yield number, None if rank is None else self._engine_of[rank]

    def computed(self, notice: Notice) -> None:
        """Notes that a prompt is computed: its transfer begins."""
        self._schedulers.progress(notice.number, notice.generated, finished=True)
        seconds = self._transfer.ms(self._tokens.pop(notice.number)) / 1e3
        heappush(self._under_way, (notice.at + seconds, notice.number))

    def transferred(self, now: float) -> Iterator[int]:
        """Yields the requests whose transfers have ended."""
        while self._under_way and self._under_way[0][0] <= now:
            yield heappop(self._under_way)[1]

    def next_due(self) -> float:
        """Returns when a transfer ends, or queued requests must be tried again, seconds."""
        due = self._schedulers.next_due()
        return min(due, self._under_way[0][0]) if self._under_way else due
