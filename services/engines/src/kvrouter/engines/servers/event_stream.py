"""Splits a stream of server-sent events into the data of each event, without I/O."""

from __future__ import annotations

_MOST_BYTES = 64 << 20
"""Limit of one event. The first one may repeat the prompt's token ids."""

END = b"[DONE]"
"""Data of the event that ends a stream of an OpenAI API."""


class EventTooLarge(ValueError):
    """An event exceeds the limit."""


class EventStream:
    """Collects the events of one response."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, received: bytes) -> list[bytes]:
        """Returns the data of the events that end in ``received``.

        Raises:
            EventTooLarge: an event exceeds 64 MiB.
        """
        # Only complete lines are joined, so that a long line costs no copy for each of its parts.
        *complete, rest = received.split(b"\n")
        events = []
        for part in complete:
            line = (bytes(self._rest) + part).removesuffix(b"\r")
            self._rest.clear()
            if line.startswith(b"data:"):
                data = line[5:].removeprefix(b" ")
                self._data.append(data)
                self._size += len(data)
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
                self._size = 0
        self._rest += rest
        if self._size + len(self._rest) > _MOST_BYTES:
            raise EventTooLarge(f"expected events of at most {_MOST_BYTES} bytes")
        return events
