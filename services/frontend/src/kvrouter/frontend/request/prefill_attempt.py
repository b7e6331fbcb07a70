"""One attempt to have a prompt computed by a prefill worker: the pools, the hand-over, and the abort if nobody fetches.

Both workers, of SGLang for example, receive the prefill worker's bootstrap address and the number of a room to meet in.
Blocks no decode worker will fetch occupy their worker's memory, so such a prefill is aborted.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import structlog
from kvrouter.engines.fields import SGLANG_TRANSFER
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.schedulers.booking_updates import LiveBooking
from kvrouter.frontend.schedulers.scheduler_link import SchedulerLink
from kvrouter.frontend.workers.attempt import Outcome, WorkerAttempt
from kvrouter.frontend.workers.client import Workers
from kvrouter.frontend.workers.failures import WorkerFailure
from kvrouter.frontend.workers.output import Output
from kvrouter.frontend.workers.poison_prompts import RequestDeaths
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.v1.common_pb2 import Rank, Role
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.message_limits import DEFAULT_LIMITS
from kvrouter.v1.registry_pb2 import WorkerRegistration
from kvrouter.v1.worker_pb2 import TransferParams
from tenacity import AsyncRetrying, retry_if_result, stop_after_delay, wait_random_exponential


class PrefillPools(NamedTuple):
    """The prefill pools that can compute prompts for a decode pool."""

    views: tuple[ComponentView, ...]
    """The pools with live workers, in order of name."""
    why_none: str = ""
    """Why there is none, in English; empty if there is one."""


def prefill_pools(
    decode: ComponentView,
    components: Iterable[ComponentView],
    can_prefill: Callable[[WorkerRegistration], bool] = lambda _: True,
) -> PrefillPools:
    """Returns the pools of a decode pool's model and namespace whose blocks have its size."""
    model, block_size = decode.model, decode.block_size
    of_model = [
        view
        for view in components
        if view.role == Role.ROLE_PREFILL and view.model == model and view.name.namespace == decode.name.namespace
    ]
    if not of_model:
        return PrefillPools((), f"no prefill pool serves {model}")
    matching = [view for view in of_model if view.block_size == block_size]
    if not matching:
        sizes = ", ".join(sorted(f"{view.name} has {view.block_size}" for view in of_model))
        return PrefillPools((), f"no prefill pool has blocks of {block_size} tokens: {sizes}")
    live = [
        view
        for view in matching
        if any(not worker.draining and can_prefill(worker) for worker in view.workers.values())
    ]
    if not live:
        return PrefillPools((), f"no prefill worker of {model} can serve the request")
    return PrefillPools(tuple(sorted(live, key=lambda view: str(view.name))))


_ROOM_BITS = 62


def draw_room(worker: WorkerRegistration, rank: Rank) -> TransferParams:
    """Returns the parameters of a hand-over by a prefill worker, in a random room.

    The room modulo the number of ranks is the prefill rank, by which SGLang finds it.
    """
    host, _, port = worker.bootstrap_endpoint.rpartition(":")
    ranks = max(1, len(worker.ranks))
    room = secrets.randbits(_ROOM_BITS) // ranks * ranks + rank.dp_rank
    payload = {"bootstrap_host": host.strip("[]"), "bootstrap_port": int(port), "bootstrap_room": room}
    return TransferParams(format=SGLANG_TRANSFER, payload=json.dumps(payload).encode())


MAX_TRANSFER_BYTES = DEFAULT_LIMITS.besides_bytes // 2
"""Maximum size of transfer parameters: what a worker accepts in a request, less what the client's request may have."""


class PrefillFailed(Exception):
    """The prefill worker does not compute the prompt, or does not say where its blocks are."""


class PrefillLost(PrefillFailed):
    """A prefill failed after its decode worker had received the request."""


class PrefillAttempt:
    """A booked prefill. ``end`` must follow."""

    def __init__(
        self,
        booking: LiveBooking,
        endpoint: str,
        link: SchedulerLink,
        params: TransferParams | None,
        deaths: RequestDeaths,
    ) -> None:
        """``params`` are set if the decode worker receives the request at the same time."""
        self.booking = booking
        self.endpoint = endpoint
        self.on_lost: Callable[[PrefillLost], None] | None = None
        """Called if the prefill fails after its transfer parameters are known."""
        self.computed_ns = 0
        """Time by ``time.perf_counter_ns`` at which the worker said that it has computed the prompt; 0 before."""
        self.may_keep_blocks = False
        """Whether the worker has computed the prompt, or may yet do so, and then keeps its blocks."""
        self.lost: PrefillLost | None = None
        """How the prefill failed after its transfer parameters were known."""
        self._link = link
        self._deaths = deaths
        self._attempt: WorkerAttempt | None = None
        self._freed = False
        self._cached_tokens: int | None = None
        self._params: asyncio.Future[TransferParams] = asyncio.get_running_loop().create_future()
        self._params.add_done_callback(_retrieve)
        if params is not None:
            self._params.set_result(params)

    def follow(self, attempt: WorkerAttempt) -> None:
        """Follows the started call, whose output ``take`` receives."""
        self._attempt = attempt
        attempt.ended.add_done_callback(lambda ended: self._settle(ended.result()))

    async def transfer_params(self) -> TransferParams:
        """Returns the parameters for the decode worker, as soon as they are known.

        Raises:
            PrefillFailed: the worker has failed, or has not sent it.
        """
        return await asyncio.shield(self._params)

    def end(self) -> None:
        """Cancels the prefill if it is running, and frees its booking."""
        self._free()
        if self._attempt is not None:
            if not self._attempt.ended.done():
                self.may_keep_blocks = True  # The cancellation may meet a prefill that has just been completed.
            self._attempt.cancel()

    def take(self, output: Output) -> None:
        """Receives output of the prefill worker."""
        if output.tokens:
            self.computed_ns = time.perf_counter_ns()
            self._link.prefill_complete(self.booking)
        if output.cached_tokens is not None:
            self._cached_tokens = output.cached_tokens
        params = output.transfer_params
        if params is None or self._params.done():
            return
        if (size := len(params.payload)) <= MAX_TRANSFER_BYTES:
            self._params.set_result(params)
        else:
            why = f"sent {size} bytes of transfer parameters: expected at most {MAX_TRANSFER_BYTES}"
            self._params.set_exception(PrefillFailed(f"worker {self.booking.rank.worker_id} {why}"))

    def _settle(self, outcome: Outcome) -> None:
        """Frees the booking when the call has ended, and reports a failure."""
        if self._freed:
            return
        self._free()
        if isinstance(outcome, WorkerFailure):
            self._deaths.add(outcome)
        if outcome is None:
            self.may_keep_blocks = True
            message = f"worker {self.booking.rank.worker_id} sent no transfer parameters"
        else:
            message = outcome.message if isinstance(outcome, WorkerFailure | KvRouterError) else str(outcome)
            self.may_keep_blocks = isinstance(outcome, WorkerFailure) and outcome.may_still_run
        if not self._params.done():
            self._params.set_exception(PrefillFailed(message))
        elif outcome is not None:
            self.lost = PrefillLost(message)
            if self.on_lost is not None:
                self.on_lost(self.lost)

    def _free(self) -> None:
        if not self._freed:
            self._freed = True
            self._link.free(self.booking, self._cached_tokens)


def _retrieve(params: asyncio.Future[TransferParams]) -> None:
    """Marks an exception as retrieved, since nobody may wait for it any more."""
    if not params.cancelled():
        params.exception()


log = structlog.get_logger(component="frontend")

_PATIENCE_SECONDS = 600.0
"""Time for which a worker that cannot be reached is tried; longer than engines keep the blocks of a prefill."""
_MAX_PAUSE_SECONDS = 10.0
MAX_ABORTS = 16_384
"""Aborts that are under way at once. Beyond it a worker keeps the blocks until its own time limit."""


class AbandonedPrefills:
    """Aborts in the background, so the end of a request need not wait. ``run`` must be running.

    A worker that cannot be reached, such as one behind a connection that fell silent, is tried again until it leaves.
    """

    def __init__(self, metrics: FrontendMetrics) -> None:
        self._metrics = metrics
        self._queue: asyncio.Queue[tuple[Workers, str, str]] = asyncio.Queue(MAX_ABORTS)
        self._aborting: dict[tuple[str, str], asyncio.Task[None]] = {}
        """Aborts under way, by address of the worker and id of the request."""

    @property
    def pending(self) -> int:
        """Number of aborts under way, at most ``MAX_ABORTS``."""
        return self._queue.qsize() + len(self._aborting)

    def abort(self, workers: Workers, endpoint: str, request_id: str) -> None:
        """Aborts a request at its prefill worker soon."""
        self._metrics.abandoned_prefills.inc()
        if self.pending >= MAX_ABORTS:
            return
        self._queue.put_nowait((workers, endpoint, request_id))

    def forget(self, endpoint: str, request_id: str) -> None:
        """Stops aborting a request that is about to run on the worker again, which replaces its earlier prefill."""
        if (aborting := self._aborting.get((endpoint, request_id))) is not None:
            aborting.cancel()

    async def run(self) -> None:
        """Aborts until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                workers, endpoint, request_id = await self._queue.get()
                log.info("prefill.aborted", request_id=request_id, endpoint=endpoint)
                self.forget(endpoint, request_id)
                aborting = group.create_task(_abort(workers, endpoint, request_id))
                self._aborting[endpoint, request_id] = aborting
                aborting.add_done_callback(partial(self._ended, (endpoint, request_id)))

    def _ended(self, key: tuple[str, str], aborting: asyncio.Task[None]) -> None:
        if self._aborting.get(key) is aborting:
            del self._aborting[key]


async def _abort(workers: Workers, endpoint: str, request_id: str) -> None:
    """Aborts a request once its worker can be reached; gives up if the worker leaves."""

    async def is_over() -> bool:
        return endpoint not in workers.health.endpoints() or await workers.abort(endpoint, request_id)

    await AsyncRetrying(
        wait=wait_random_exponential(multiplier=0.1, max=_MAX_PAUSE_SECONDS),
        stop=stop_after_delay(_PATIENCE_SECONDS),
        retry=retry_if_result(lambda over: not over),
        retry_error_callback=lambda _: False,
    )(is_over)
