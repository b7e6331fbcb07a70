"""Reads an engine's stream of server-sent events, whose pieces end anywhere."""

from __future__ import annotations

import re

_EVENT_END = re.compile(rb"\r\n\r\n|\n\n")
_LONGEST_END = len(b"\r\n\r\n")
_DATA = b"data:"


class EventReader:
    """Cuts a stream into its events."""

    def __init__(self) -> None:
        self._begun = bytearray()

    def __len__(self) -> int:
        """Returns the size of the event that has begun, bytes."""
        return len(self._begun)

    def take(self, piece: bytes) -> list[bytes]:
        """Returns the events ending in a further piece, each with its end."""
        scanned = max(0, len(self._begun) - _LONGEST_END)
        self._begun += piece
        events, at = [], 0
        for end in _EVENT_END.finditer(self._begun, scanned):
            events.append(bytes(self._begun[at : end.end()]))
            at = end.end()
        del self._begun[:at]
        return events

    def rest(self) -> bytes:
        """Returns the event that has begun, and forgets it."""
        begun = bytes(self._begun)
        self._begun.clear()
        return begun


def data_of(event: bytes) -> bytes:
    """Returns the data of an event; empty for a comment or another field."""
    return event[len(_DATA) :].strip() if event.startswith(_DATA) else b""


def count_tokens(piece: bytes) -> int:
    """Returns the number of tokens for which a piece of a stream stands: one for each event, at least one."""
    return piece.count(_DATA) or 1
