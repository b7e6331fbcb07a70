"""Admission holds a request to the limits of its caller and to the bounds of the Frontend together."""

from __future__ import annotations

from typing import Any

import pytest
from kvrouter.frontend.access.access import Access
from kvrouter.frontend.access.caller import Caller, RateLimits, acting_for
from kvrouter.frontend.access.limit_table import LimitTable
from kvrouter.frontend.access.quotas import Quotas
from kvrouter.frontend.access.refusals import Refusals
from kvrouter.frontend.admission.overload_bounds import OverloadBounds, OverloadLimits
from kvrouter.frontend.admission.request_admission import RequestAdmission
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.runtime.errors import Overloaded, RateLimited, Unauthenticated
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor
from prometheus_client import CollectorRegistry

POOLS = [ComponentView(ComponentName("n", "c"), ComponentDescriptor(model="m"), {})]
CALLER = Caller("caller", limits=RateLimits(tokens_per_minute=60.0, concurrency=2))


def admission(*, requests: int = 0) -> RequestAdmission:
    keys: Any = None
    access = Access(keys, None, Refusals(CollectorRegistry()), Quotas(LimitTable(clock=lambda: 0.0)))
    return RequestAdmission(access, OverloadBounds(OverloadLimits(requests, 0, 0.0), CollectorRegistry()))


def test_a_request_without_room_costs_its_caller_no_tokens_and_no_concurrency() -> None:
    admitting = admission(requests=1)
    with acting_for(CALLER):
        running = admitting.admit(POOLS, 5, 5, "call")
        for _ in range(3):
            with pytest.raises(Overloaded):
                admitting.admit(POOLS, 50, 0, "call")
        running.end(5)
        admitting.admit(POOLS, 50, 0, "call").end(0)


def test_output_that_is_not_known_is_charged_as_estimated() -> None:
    admitting = admission()
    with acting_for(CALLER):
        admitting.admit(POOLS, 10, 40, "call").end(None)
        with pytest.raises(RateLimited):
            admitting.admit(POOLS, 11, 0, "call")
        admitting.admit(POOLS, 10, 0, "call").end(0)
        admitting.admit(POOLS, 10, 0, "call")


def test_a_request_without_a_caller_is_refused_where_callers_are_limited() -> None:
    with pytest.raises(Unauthenticated):
        admission().admit(POOLS, 1, 1, "call")
    RequestAdmission().admit(POOLS, 1, 1, "call").end(1)
