"""Room for the bodies of requests: a body is read, and decompressed, only into bytes taken before.

The bytes are those of the bound of prompts in flight, which holders share (``FairBound``). A body that finds no room
waits for WAIT_SECONDS at most, those of one holder in the order of their arrival. Room is taken as bytes arrive, so a
client holds no more than about twice what it has sent. Bodies waiting for each other to end would all be refused: the
oldest one that is being read always gets room, so the bound may be exceeded by one body. Where callers are known, the
bodies of one holder take three quarters of the bound at most, so slow ones leave room for others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import NamedTuple

from kvrouter.frontend.access.quotas import TOKEN_BYTES, Grant
from kvrouter.runtime.bounds import FREE, FairBound
from kvrouter.v1.errors import Overloaded, TooLarge
from msgspec import Struct

WAIT_SECONDS = 5.0
"""Maximum time a body waits for room, seconds."""
MAX_WAITING = 1024
"""Maximum number of bodies waiting. Each has some 128 KiB in the buffer of its connection."""


class BodyTooLarge(TooLarge):
    """A body exceeds a limit in bytes. Over HTTP its status is 413."""


class _Waiting(NamedTuple):
    room: BodyRoom
    amount: int
    taken: asyncio.Future[None]


class BodyRooms:
    """The room of all bodies of a process."""

    def __init__(self, bound: FairBound, refusal: Callable[[str], Overloaded]) -> None:
        """``bound`` counts bytes; ``refusal`` returns the error with a message."""
        self._bound = bound
        self._refusal = refusal
        self._waiting: list[_Waiting] = []
        self._reading: dict[BodyRoom, None] = {}
        """Bodies with room that are being read, the oldest first."""
        self._used: dict[str, int] = {}
        """Room of the bodies of each known holder."""

    @property
    def waiting(self) -> int:
        """Number of bodies waiting for room."""
        return len(self._waiting)

    def try_take(self, room: BodyRoom, amount: int, *, has_waited: bool = False, is_whole: bool = False) -> bool:
        """Takes further room for a body. Returns False if there is none, or if earlier bodies of its holder wait.

        ``is_whole``: whether all of the body has arrived, so it needs no further room.
        """
        holder, is_oldest = room.holder, bool(self._reading) and self._is_oldest(room)
        if self._waiting and not has_waited and any(each.room.holder == holder for each in self._waiting):
            return False
        if holder and not is_oldest and self._has_its_part(holder, amount):
            return False
        requests = 0 if room.size else 1
        if not self._bound.try_add(holder, room.weight, amount, requests=requests, is_forced=is_oldest):
            return False
        if holder:
            self._note(holder, amount)
        room.size += amount
        if not is_whole:
            self._reading.setdefault(room)
        return True

    async def wait(self, room: BodyRoom, amount: int) -> None:
        """Takes further room for a body as soon as there is some.

        Raises:
            Overloaded: there is none in time, or too many bodies wait.
        """
        if len(self._waiting) >= MAX_WAITING:
            raise self._refusal("too many bodies of requests wait for room")
        waiting = _Waiting(room, amount, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._serve()
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await waiting.taken
        except TimeoutError:
            raise self._refusal(f"there was no room for the body for {WAIT_SECONDS:g} s") from None
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    def give_back(self, room: BodyRoom, amount: int) -> None:
        """Gives room back, and serves waiting bodies."""
        room.size -= amount
        if not room.size:
            self._reading.pop(room, None)
        self._bound.remove(room.holder, amount, requests=0 if room.size else 1)
        if room.holder:
            self._note(room.holder, -amount)
        if self._waiting:
            self._serve()

    def remove_prompt(self, holder: str, size: int) -> None:
        """Removes a prompt from the bound, and serves waiting bodies."""
        self._bound.remove(holder, size)
        if self._waiting:
            self._serve()

    def end_reading(self, room: BodyRoom) -> None:
        """Notes the end of a body: it needs no further room."""
        if room in self._reading:
            del self._reading[room]
            if self._waiting:
                self._serve()

    def _serve(self) -> None:
        passed_over = set[str]()
        for waiting in list(self._waiting):
            holder = waiting.room.holder
            if waiting.taken.done() or (holder in passed_over and not self._is_oldest(waiting.room)):
                continue
            if self.try_take(waiting.room, waiting.amount, has_waited=True):
                self._waiting.remove(waiting)
                waiting.taken.set_result(None)
            else:
                passed_over.add(holder)

    def _is_oldest(self, room: BodyRoom) -> bool:
        return room is next(iter(self._reading), None)

    def _has_its_part(self, holder: str, amount: int) -> bool:
        used = self._used.get(holder, 0)
        return bool(self._bound.most and used) and used + amount > FREE * self._bound.most

    def _note(self, holder: str, amount: int) -> None:
        self._used[holder] = self._used.get(holder, 0) + amount
        if not self._used[holder]:
            del self._used[holder]


current_room: ContextVar[BodyRoom | None] = ContextVar("kvrouter_body_room", default=None)
"""The room of the body of the request running in this task; None if it has none."""


class BodyRoom(Struct, eq=False):
    """The room of one body, which ``end`` gives back. As a context it is that of the request which runs there."""

    _rooms: BodyRooms
    holder: str
    """Who has a share of the bound; empty if callers are not known."""
    weight: float
    _grant: Grant | None
    """Counts the body until its tokens are known."""
    size: int = 0
    """Taken bytes."""
    _unclaimed: int = 0
    _token: Token[BodyRoom | None] | None = None

    def __enter__(self) -> BodyRoom:
        self._token = current_room.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            current_room.reset(self._token)

    async def hold(self, size: int) -> None:
        """Takes room until it is at least ``size`` bytes.

        Raises:
            Overloaded: there is none in time.
        """
        amount = size - self.size
        if amount > 0 and not self._rooms.try_take(self, amount):
            await self._rooms.wait(self, amount)

    def try_hold_all(self, size: int) -> bool:
        """Takes room for a body of which all bytes have arrived. Returns False if there is none at once."""
        if size and not self._rooms.try_take(self, size, is_whole=True):
            return False
        self._note_size(size)
        return True

    def is_read(self, size: int) -> None:
        """Notes that the whole body has so many bytes, and gives the rest of its room back."""
        if self.size > size:
            self._rooms.give_back(self, self.size - size)
        self._rooms.end_reading(self)
        self._note_size(size)

    def _note_size(self, size: int) -> None:
        self._unclaimed = size
        if self._grant is not None:
            self._grant.estimate(size // TOKEN_BYTES)

    def claim(self, size: int) -> int:
        """Uses the room for a prompt of the body too. Returns how many bytes the prompt needs beside it."""
        claimed = min(size, self._unclaimed)
        self._unclaimed -= claimed
        return size - claimed

    def end(self) -> None:
        """Gives the room back."""
        if self.size:
            self._rooms.give_back(self, self.size)
