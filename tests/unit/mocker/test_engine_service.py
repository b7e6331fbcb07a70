"""Requests of a server and their output."""

from __future__ import annotations

import pytest
from kvrouter.mocker.clock import EngineClock
from kvrouter.mocker.driver import EngineDriver, Tokens
from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.mocker.engine.reference import Engine
from kvrouter.mocker.engine.types import EngineRequest, FinishReason, pack_tokens
from kvrouter.mocker.serving.service import EngineService, NoSuchRank

REQUEST = EngineRequest("one", pack_tokens([1, 2, 3]), max_tokens=2)


@pytest.fixture
def service() -> EngineService:
    drivers = {
        rank: EngineDriver(Engine(EngineConfig()), EngineClock(1), lambda _: None, lambda out: service.emit(out))
        for rank in (0, 1)
    }
    service = EngineService(drivers)
    return service


def test_requests_without_a_rank_go_to_the_idlest(service: EngineService) -> None:
    requests = [EngineRequest(str(number), REQUEST.prompt, max_tokens=2) for number in range(4)]
    ranks = [service.start(requests[0], 1, print), *(service.start(each, None, print) for each in requests[1:])]
    assert ranks == [1, 0, 0, 1]
    with pytest.raises(NoSuchRank):
        service.start(REQUEST, 2, print)


def test_the_end_of_a_request_spares_a_later_one_with_its_id(service: EngineService) -> None:
    received: list[str] = []

    def first(_: Tokens) -> None:
        received.append("first")

    def second(_: Tokens) -> None:
        received.append("second")

    service.start(REQUEST, 0, first)
    service.emit([("one", Tokens([7], finish_reason=FinishReason.LENGTH))])
    service.start(REQUEST, 1, second)
    service.cancel("one", first)
    assert service.request_ids() == ["one"]
    service.cancel("one", second)
    assert service.request_ids() == []
    assert received == ["first"]
