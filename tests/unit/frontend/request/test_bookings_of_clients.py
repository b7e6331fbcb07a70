"""Updates of bookings that a client made itself reach the Scheduler that has them, even if others fail."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from kvrouter.frontend import service
from kvrouter.frontend.access.client_bookings import ClientBookings
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.service import FrontendService
from kvrouter.frontend.settings import FrontendSettings
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import BookingKey
from kvrouter.v1.errors import DeadlineExceeded, DependencyAway
from kvrouter.v1.frontend_pb2 import FrontendServiceFreeRequest, FrontendServiceMarkPrefillCompleteRequest
from kvrouter.v1.scheduler_pb2 import FreeResponse, MarkPrefillCompleteResponse
from prometheus_client import CollectorRegistry

BOOKING = BookingKey(request_id="a")


class Knowing:
    """A Scheduler that knows the booking, or does not; None is away."""

    def __init__(self, known: bool | None) -> None:
        self.known = known

    async def free(self, request: Any, *, deadline: Deadline) -> FreeResponse:
        return FreeResponse(known=self._answer())

    async def mark_prefill_complete(self, request: Any, *, deadline: Deadline) -> MarkPrefillCompleteResponse:
        return MarkPrefillCompleteResponse(known=self._answer())

    def _answer(self) -> bool:
        if self.known is None:
            raise DependencyAway("connection refused")
        return self.known


class Frozen(Knowing):
    """A Scheduler that does not answer."""

    def __init__(self) -> None:
        super().__init__(None)

    async def free(self, request: Any, *, deadline: Deadline) -> FreeResponse:
        await asyncio.sleep(deadline.remaining() or 0)
        raise DeadlineExceeded


def frontend(*known: bool | None) -> FrontendService:
    links: Any = SimpleNamespace(
        schedulers=lambda: [Knowing(each) for each in known], live_bookings=0, sharded_components=0
    )
    return served(links)


def served(links: Any) -> FrontendService:
    directory: Any = SimpleNamespace(components={"one": None})
    nothing: Any = []
    registry = CollectorRegistry()
    metrics = FrontendMetrics(registry)
    runner: Any = SimpleNamespace(links=links, models=nothing, access=None, metrics=metrics, pool_choice=None)
    bookings = ClientBookings(
        FrontendSettings(max_bookings_per_caller=1, max_sessions_per_caller=1, max_lease_seconds=1.0), None, registry
    )
    return FrontendService(directory, runner, nothing, bookings, nothing, nothing)


async def sent(requested: FrontendService) -> tuple[bool, bool]:
    marked = await requested.mark_prefill_complete(
        FrontendServiceMarkPrefillCompleteRequest(booking=BOOKING), deadline=Deadline.after(1)
    )
    released = await requested.free(FrontendServiceFreeRequest(booking=BOOKING), deadline=Deadline.after(1))
    return marked.known, released.known


@pytest.mark.parametrize("known", [(True,), (False, True), (None, True), (True, None)])
async def test_whoever_has_it_gets_the_call(known: tuple[bool | None, ...]) -> None:
    assert await sent(frontend(*known)) == (True, True)


async def test_one_that_nobody_has_is_no_error() -> None:
    assert await sent(frontend(False, False)) == (False, False)


@pytest.mark.parametrize("known", [(), (None,), (False, None)])
async def test_the_error_says_that_an_unreachable_scheduler_may_have_it(
    known: tuple[bool | None, ...],
) -> None:
    with pytest.raises(DependencyAway):
        await frontend(*known).free(FrontendServiceFreeRequest(booking=BOOKING), deadline=Deadline.after(1))
    with pytest.raises(DependencyAway):
        await frontend(*known).mark_prefill_complete(
            FrontendServiceMarkPrefillCompleteRequest(booking=BOOKING), deadline=Deadline.after(1)
        )


@pytest.mark.parametrize("known", [True, False])
async def test_one_that_is_frozen_delays_a_release_by_heartbeats_only(
    monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    monkeypatch.setattr(service, "ANSWER_SECONDS", 0.02)
    schedulers = [Frozen(), Knowing(known)]
    links: Any = SimpleNamespace(schedulers=lambda: schedulers, live_bookings=0, sharded_components=0)
    releasing = served(links).free(FrontendServiceFreeRequest(booking=BOOKING), deadline=Deadline.after(600))
    if known:
        assert (await releasing).known
    else:
        with pytest.raises(DependencyAway):
            await releasing
