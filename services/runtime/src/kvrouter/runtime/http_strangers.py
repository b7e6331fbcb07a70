"""Paces requests without a credential, and those beyond the limits of their credential.

To refuse a request costs an HTTP server nearly as much as to serve one, so a flood of them would delay the requests
that are served. Their connections are strangers, which take turns: one for each request, as many a second as take a
small part of the process's time. A connection that shows a credential whose limits leave room waits for none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from kvrouter.net.token_bucket import TokenBucket

END_OF_HEADERS = b"\r\n\r\n"
_TURNS_PER_SECOND = 500
"""Requests of strangers in a second: some 15% of a core, if each takes 0.3 ms."""
_BURST = 100
"""Requests of strangers that are served at once."""
_TICK_SECONDS = 0.02
MAX_HELD_BYTES = 8 << 20
"""Bytes that wait for turns, of all connections. At more, the connection that has most of them is closed."""


def nobody(_head: bytes) -> bool:
    """Recognizes no client, for ports whose requests have no credentials."""
    return False


class Stranger(Protocol):
    """A connection whose last request was not admitted."""

    def hold(self, data: bytes) -> None:
        """Stores received data until its turn, and reads no more meanwhile."""

    def pass_on(self) -> None:
        """Processes the next request of what is held."""

    @property
    def held(self) -> int:
        """Number of bytes that are held."""

    def abort(self) -> None:
        """Closes the connection at once."""


class StrangerTurns:
    """The turns of the strangers of one port."""

    def __init__(self, recognizes: Callable[[bytes], bool]) -> None:
        """``recognizes`` returns whether the beginning of a request shows a credential that admits it."""
        self.held = 0
        """Number of bytes that wait for turns."""
        self._recognizes = recognizes
        self._turns = TokenBucket(_TURNS_PER_SECOND, _BURST)
        self._waiting: dict[Stranger, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def must_wait(self, stranger: Stranger, data: bytes) -> bool:
        """Takes a turn for data of a stranger, or makes it wait. Returns whether it waits."""
        if not self._waiting and self._turns.try_take():
            if data.find(END_OF_HEADERS) in (-1, len(data) - len(END_OF_HEADERS)):
                return False
            stranger.hold(data)
            stranger.pass_on()
            self.held += stranger.held
        elif stranger not in self._waiting and self._recognizes(data[: data.find(END_OF_HEADERS)]):
            return False
        else:
            stranger.hold(data)
            self.held += len(data)
        self._waiting[stranger] = None
        if self.held > MAX_HELD_BYTES:
            max(self._waiting, key=lambda each: each.held).abort()
        if self._timer is None:
            self._wait()
        return True

    def forget(self, stranger: Stranger) -> None:
        """Drops a connection that is closed."""
        if stranger in self._waiting:
            del self._waiting[stranger]
            self.held -= stranger.held

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._serve)

    def _serve(self) -> None:
        self._timer = None
        while self._waiting and self._turns.try_take():
            stranger = next(iter(self._waiting))
            self.forget(stranger)
            stranger.pass_on()
            if stranger.held:
                self._waiting[stranger] = None
                self.held += stranger.held
        if self._waiting:
            self._wait()
