"""Room that a tenant with its share leaves free for others."""

from __future__ import annotations

import itertools

import numpy as np
from kvrouter.runtime.booking_updates import Key
from kvrouter.scheduler.load.headroom import MAX_TENANTS, RECENT_S, SPARE, Headroom, delays, places, takes_kept_room
from kvrouter.scheduler.request.options import Tenant
from kvrouter.v1.common_pb2 import Stage

PLACES = 16


class Tenants:
    """Requests of tenants, as a component sees them."""

    def __init__(self) -> None:
        self.headroom = Headroom()
        self._numbers = itertools.count()
        self._running: dict[str, list[Key]] = {}

    def begin(self, name: str, count: int, now: float, *, tokens: int = 100, weight: float = 1.0) -> None:
        for _ in range(count):
            key = (str(next(self._numbers)), 0, Stage.STAGE_WHOLE)
            self.headroom.began(key, Tenant(name, weight), tokens, 512, now)
            self._running.setdefault(name, []).append(key)

    def end(self, name: str, count: int, now: float) -> None:
        for _ in range(count):
            self.headroom.ended(self._running[name].pop(), now)

    def limits(self, name: str, now: float) -> bool:
        return self.headroom.uses_more(name, now) and self.headroom.has_share(name, PLACES * 100, PLACES)


def beside_a_flood(quiet: int, *, seconds: float = 10.0) -> Tenants:
    """A tenant that had so many requests at once for some time, beside another that has all other places."""
    tenants = Tenants()
    tenants.begin("quiet", quiet, 0.0)
    tenants.begin("flood", PLACES - quiet, 0.0)
    tenants.headroom.kept("flood", PLACES, seconds)
    return tenants


def test_a_tenant_alone_leaves_nothing_free() -> None:
    tenants = Tenants()
    tenants.begin("flood", PLACES, 0.0)
    assert not tenants.limits("flood", 1.0)


def test_what_a_quiet_tenant_had_at_once_is_kept_when_its_requests_end() -> None:
    tenants = beside_a_flood(4)
    assert tenants.limits("flood", 10.0)
    assert not tenants.limits("quiet", 10.0)
    assert tenants.headroom.kept("flood", PLACES, 10.0) == SPARE
    for ended in range(1, 5):
        tenants.end("quiet", 1, 10.0)
        assert tenants.headroom.kept("flood", PLACES, 10.0) == ended + SPARE


def test_a_tenant_below_its_share_is_not_limited() -> None:
    tenants = beside_a_flood(4)
    tenants.end("flood", 5, 10.0)
    assert not tenants.limits("flood", 10.0)
    assert not tenants.limits("quiet", 10.0)


def test_shares_follow_weights() -> None:
    tenants = Tenants()
    tenants.begin("heavy", 11, 0.0, weight=3.0)
    tenants.begin("light", 4, 0.0)
    assert tenants.limits("light", 1.0)
    assert not tenants.limits("heavy", 1.0)


def test_a_tenant_that_has_gone_is_forgotten() -> None:
    tenants = beside_a_flood(4)
    tenants.end("quiet", 4, 10.0)
    assert tenants.limits("flood", 10.0 + RECENT_S)
    assert not tenants.limits("flood", 11.1 + RECENT_S)
    assert len(tenants.headroom) == 1


def test_little_is_kept_for_many_that_rarely_send() -> None:
    tenants = Tenants()
    tenants.begin("flood", PLACES, 0.0)
    for number in range(40):
        tenants.begin(f"rare-{number}", 1, number)
        tenants.end(f"rare-{number}", 1, number + 0.5)
    assert tenants.limits("flood", 40.0)
    assert 1 <= tenants.headroom.kept("flood", PLACES, 40.0) <= 4


def test_never_more_than_half_of_all_places_is_kept() -> None:
    tenants = Tenants()
    for number in range(12):
        tenants.begin(f"other-{number}", 3, 0.0)
    tenants.begin("flood", 4, 0.0)
    tenants.headroom.kept("flood", PLACES, 20.0)
    for number in range(12):
        tenants.end(f"other-{number}", 3, 20.0)
    assert tenants.limits("flood", 20.0)
    assert tenants.headroom.kept("flood", PLACES, 20.0) == PLACES // 2


def test_a_bounded_number_of_tenants_is_remembered() -> None:
    tenants = Tenants()
    for number in range(2 * MAX_TENANTS):
        tenants.begin(str(number), 1, float(number))
    assert len(tenants.headroom) == MAX_TENANTS
    for number in range(2 * MAX_TENANTS):
        tenants.end(str(number), 1, 1000.0)
    assert not tenants.limits("0", 2000.0)
    assert len(tenants.headroom) == 0


def test_a_request_is_sent_once_and_ends_once() -> None:
    tenants = Tenants()
    tenants.begin("flood", 8, 0.0)
    key = ("again", 0, Stage.STAGE_WHOLE)
    for _ in range(2):
        tenants.headroom.began(key, Tenant("quiet"), 100, 512, 0.0)
    for _ in range(2):
        tenants.headroom.ended(key, 1.0)
    tenants.headroom.kept("flood", PLACES, 10.0)
    assert tenants.headroom.kept("flood", PLACES, 10.0) == 1 + SPARE


def test_places_are_what_slots_and_blocks_allow() -> None:
    slots, blocks = np.array([3.0, 8.0, -1.0, np.inf]), np.array([np.inf, 70.0, 70.0, np.inf])
    assert places(slots, blocks, 32).tolist() == [3, 2, 0, np.inf]


def test_a_request_goes_where_it_leaves_enough_places() -> None:
    before, after = np.array([2.0, 2.0]), np.array([1.0, 2.0])  # on the second one, it shares blocks that are in use
    assert takes_kept_room(before, after, 3).tolist() == [False, False]
    assert takes_kept_room(before, after, 4).tolist() == [True, False]


def test_prompts_that_others_would_wait_for_are_not_piled_up() -> None:
    booked, added = np.array([0, 0, 128, 512, 8192]), np.array([512, 30_000, 512, 512, 1])
    assert delays(booked, added, 512.0).tolist() == [False, False, False, True, True]
