"""Room for bodies: taken before they are read, shared by its holders, and waited for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kvrouter.frontend.access import body_room
from kvrouter.frontend.access.body_room import BodyRoom, BodyRooms
from kvrouter.runtime.bounds import FairBound
from kvrouter.v1.errors import Overloaded

from ....waiting import until


class Rooms:
    """Rooms of a bound of 100 bytes."""

    def __init__(self) -> None:
        self.bound = FairBound(100)
        self.all = BodyRooms(self.bound, lambda message: Overloaded(message, 1000))

    def room(self, holder: str = "") -> BodyRoom:
        return BodyRoom(self.all, holder, 1.0, None)

    async def held(self, size: int, holder: str = "") -> BodyRoom:
        """Returns room of a body that has been read."""
        room = self.room(holder)
        await room.hold(size)
        room.is_read(size)
        return room


@pytest.fixture
def rooms() -> Rooms:
    return Rooms()


async def waiting(rooms: Rooms, *holding: Any) -> list[asyncio.Task[None]]:
    """Starts to take room, and returns when all of it is waited for."""
    before = rooms.all.waiting
    tasks = [asyncio.create_task(each) for each in holding]
    await until(lambda: rooms.all.waiting == before + len(tasks))
    return tasks


async def test_a_body_waits_until_another_one_ends(rooms: Rooms) -> None:
    first, second = await rooms.held(80), rooms.room()
    (task,) = await waiting(rooms, second.hold(40))
    first.end()
    await task
    assert rooms.bound.used == second.size == 40
    second.end()
    assert rooms.bound.used == 0


async def test_a_body_is_refused_when_it_has_waited(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_room, "WAIT_SECONDS", 0.01)
    await rooms.held(80)
    with pytest.raises(Overloaded) as refused:
        await rooms.room().hold(40)
    assert refused.value.info.retry_after_ms == 1000
    assert (rooms.bound.used, rooms.all.waiting) == (80, 0)


async def test_too_many_waiting_bodies_are_refused_at_once(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_room, "MAX_WAITING", 1)
    first = await rooms.held(80)
    (task,) = await waiting(rooms, rooms.room().hold(40))
    with pytest.raises(Overloaded):
        await rooms.room().hold(40)
    first.end()
    await task


async def test_a_cancelled_wait_takes_nothing(rooms: Rooms) -> None:
    first, second = await rooms.held(80), rooms.room()
    (task,) = await waiting(rooms, second.hold(40))
    task.cancel()
    await asyncio.wait([task])
    second.end()
    first.end()
    assert rooms.bound.used == 0


async def test_bodies_that_wait_for_each_other_to_end_are_read_one_after_the_other(rooms: Rooms) -> None:
    bodies = [rooms.room() for _ in range(4)]
    for body in bodies:
        await body.hold(25)
    for number, body in enumerate(bodies):
        await waiting(rooms, *(each.hold(60) for each in bodies[number + 1 :] if not number))
        await body.hold(60)
        body.is_read(60)
        body.end()
    assert rooms.bound.used == 0


async def test_the_bodies_of_one_caller_leave_room_for_another(rooms: Rooms) -> None:
    first = await rooms.held(70, "a")
    (task,) = await waiting(rooms, rooms.room("a").hold(20))
    other = await rooms.held(20, "b")
    assert not task.done()
    other.end()
    assert not task.done()
    first.end()
    await task


async def test_a_body_that_has_arrived_takes_its_room_in_one_step_or_waits_for_it(rooms: Rooms) -> None:
    first, second = rooms.room(), rooms.room()
    assert first.try_hold_all(80)
    assert not second.try_hold_all(40)
    assert (rooms.bound.used, second.size) == (80, 0)
    (task,) = await waiting(rooms, second.hold(40))
    first.end()
    await task
    second.is_read(40)
    assert rooms.bound.used == 40


async def test_a_prompt_uses_the_room_of_its_body_first(rooms: Rooms) -> None:
    body = await rooms.held(50)
    assert [body.claim(size) for size in (30, 30, 30)] == [0, 10, 30]
