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
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, received: bytes) -> list[bytes]:
        """Returns the data of the events that end in ``received``.

        Raises:
            EventTooLarge: an event exceeds 64 MiB.
        """
        *lines, self._rest = (self._rest + received).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data = line[5:].removeprefix(b" ")
                self._data.append(data)
                self._size += len(data)
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
                self._size = 0
        if self._size + len(self._rest) > _MOST_BYTES:
            raise EventTooLarge(f"expected events of at most {_MOST_BYTES} bytes")
        return events
