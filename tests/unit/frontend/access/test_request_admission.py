"""Admission holds a request to the limits of its caller and to the bounds of the Frontend together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kvrouter.frontend.access.access import Access
from kvrouter.frontend.access.caller import Caller, RateLimits, acting_for
from kvrouter.frontend.access.quotas import LimitTable, Quotas
from kvrouter.frontend.access.refusals import Refusals
from kvrouter.frontend.access.request_admission import AdmittedRequest, OverloadBounds, OverloadLimits, RequestAdmission
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.v1.errors import Overloaded, RateLimited, Unauthenticated
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor
from prometheus_client import CollectorRegistry

POOLS = [ComponentView(ComponentName("n", "c"), ComponentDescriptor(model="m"), {})]
UNBOUNDED = OverloadBounds(OverloadLimits(0, 0, 0.0), CollectorRegistry())
CALLER = Caller("caller", limits=RateLimits(tokens_per_minute=60.0, concurrency=2))


class Admitting:
    """Admits requests of one caller, each as a call of its own."""

    def __init__(self, *, requests: int = 0) -> None:
        keys: Any = None
        self.quotas = Quotas(LimitTable(clock=lambda: 0.0))
        access = Access(keys, None, Refusals(CollectorRegistry()), self.quotas)
        self._admission = RequestAdmission(
            access, OverloadBounds(OverloadLimits(requests, 0, 0.0), CollectorRegistry())
        )

    @contextmanager
    def call(self, prompt_tokens: int, max_output_tokens: int, *, sequences: int = 1) -> Iterator[AdmittedRequest]:
        grant = self.quotas.admit(CALLER, 0)
        try:
            with acting_for(CALLER, grant):
                yield self._admission.admit(POOLS, prompt_tokens, max_output_tokens, "call", sequences=sequences)
        finally:
            grant.end()

    def run(self, prompt_tokens: int, max_output_tokens: int, output_tokens: int | None, *, sent: bool = True) -> None:
        with self.call(prompt_tokens, max_output_tokens) as admitted:
            admitted.end(output_tokens, sent=sent)


def test_a_request_without_room_costs_its_caller_no_tokens_and_no_concurrency() -> None:
    admitting = Admitting(requests=1)
    with admitting.call(5, 5) as running:
        for _ in range(3):
            with pytest.raises(Overloaded):
                admitting.run(50, 0, 0)
        running.end(5, sent=True)
    admitting.run(50, 0, 0)


def test_output_that_is_not_known_is_charged_as_estimated() -> None:
    admitting = Admitting()
    admitting.run(10, 40, None)
    with pytest.raises(RateLimited):
        admitting.run(11, 0, 0)
    admitting.run(10, 0, 0)


def test_a_prompt_is_charged_once_it_was_sent_whether_there_is_output_or_not() -> None:
    admitting = Admitting()
    admitting.run(60, 0, 0, sent=False)
    admitting.run(50, 10, 0)
    with pytest.raises(RateLimited):
        admitting.run(11, 0, 0)
    admitting.run(10, 0, 0)


def test_a_prompt_whose_length_was_estimated_is_charged_as_its_engine_counts_it() -> None:
    admitting = Admitting()
    with admitting.call(50, 0) as admitted:
        admitted.end(0, sent=True, prompt_tokens=30)
    admitting.run(30, 0, 0)
    with pytest.raises(RateLimited):
        admitting.run(1, 0, 0)


def test_each_sequence_of_a_forwarded_request_counts() -> None:
    admitting = Admitting()
    with pytest.raises(RateLimited, match="maximum of 2 running requests"), admitting.call(1, 1, sequences=3):
        pass
    with admitting.call(20, 20, sequences=2) as running:
        with pytest.raises(RateLimited, match="running"):
            admitting.run(0, 0, 0)
        running.end(10, sent=True)
    admitting.run(30, 0, 0)
    with pytest.raises(RateLimited, match="tokens per minute"):
        admitting.run(1, 0, 0)


def test_a_request_without_a_caller_is_refused_where_callers_are_limited() -> None:
    keys: Any = None
    access = Access(keys, None, Refusals(CollectorRegistry()), Quotas(LimitTable()))
    with pytest.raises(Unauthenticated):
        RequestAdmission(access, UNBOUNDED).admit(POOLS, 1, 1, "call")
    RequestAdmission(None, UNBOUNDED).admit(POOLS, 1, 1, "call").end(1, sent=True)
