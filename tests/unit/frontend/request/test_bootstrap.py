"""Rooms in which the decode worker of a request meets its prefill worker."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kvrouter.frontend.request.prefill_attempt import draw_room
from kvrouter.v1.common_pb2 import Rank
from kvrouter.v1.registry_pb2 import RankRegistration, WorkerRegistration


def drawn(endpoint: str = "10.0.0.1:8998", *, ranks: int = 1, dp_rank: int = 0) -> dict[str, Any]:
    worker = WorkerRegistration(
        bootstrap_endpoint=endpoint, ranks=[RankRegistration(dp_rank=each) for each in range(ranks)]
    )
    payload: dict[str, Any] = json.loads(draw_room(worker, Rank(worker_id=1, dp_rank=dp_rank)).payload)
    return payload


def test_no_two_attempts_meet_in_one_room() -> None:
    rooms = {drawn()["bootstrap_room"] for _ in range(1000)}
    assert len(rooms) == 1000
    assert all(0 <= room < 1 << 63 for room in rooms), "a signed 64-bit integer holds it"


@pytest.mark.parametrize("dp_rank", range(3))
def test_the_room_leads_to_the_booked_rank(dp_rank: int) -> None:
    assert {drawn(ranks=3, dp_rank=dp_rank)["bootstrap_room"] % 3 for _ in range(50)} == {dp_rank}


@pytest.mark.parametrize(
    ("endpoint", "host"),
    [("10.0.0.1:8998", "10.0.0.1"), ("[fd00::1]:8998", "fd00::1"), ("pod.local:8998", "pod.local")],
)
def test_host_and_port_are_those_that_the_worker_registered(endpoint: str, host: str) -> None:
    found = drawn(endpoint)
    assert (found["bootstrap_host"], found["bootstrap_port"]) == (host, 8998)
