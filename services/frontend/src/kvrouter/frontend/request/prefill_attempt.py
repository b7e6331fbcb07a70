"""One attempt to have a prompt computed by one prefill worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvrouter.frontend.schedulers.booking_updates import LiveBooking
from kvrouter.frontend.schedulers.session_link import SchedulerLink
from kvrouter.frontend.workers.attempt import Outcome, WorkerAttempt
from kvrouter.frontend.workers.failures import WorkerFailure
from kvrouter.frontend.workers.output import Output
from kvrouter.frontend.workers.poison_prompts import RequestDeaths
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.message_limits import DEFAULT_LIMITS
from kvrouter.v1.worker_pb2 import TransferParams

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
