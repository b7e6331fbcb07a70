"""Decodes bytes from etcd and NATS into text and messages.

Any process can write any bytes there. Undecodable bytes raise ``Undecodable`` with a reason. A service
passes the error to its ``Quarantine`` and continues without the entry.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from kvrouter.net.logs import get_logger

log = get_logger(__name__)

_MAX_ENTRIES = 4096
"""Maximum number of quarantined entries to store; further ones are counted but not logged."""
_SHOWN_CHARACTERS = 200
_DETAIL_CHARACTERS = 1000

_M = TypeVar("_M", bound=Message)


class Undecodable(ValueError):
    """Bytes from outside cannot be decoded, or violate an assumption of readers."""

    def __init__(self, reason: str, detail: str) -> None:
        """``reason`` is a short label for metrics; ``detail`` says the expected and the received.

        The detail may contain anything received: it is shortened and escaped here.
        """
        super().__init__(escaped(detail, _DETAIL_CHARACTERS))
        self.reason = reason


def decode_text(raw: bytes) -> str:
    """Decodes UTF-8.

    Raises:
        Undecodable: the bytes are not UTF-8 (reason ``not_utf8``).
    """
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise Undecodable("not_utf8", f"expected UTF-8, received {printable(raw)}: {error.reason}") from None


def decode_message(kind: type[_M], raw: bytes) -> _M:
    """Decodes a protobuf message.

    Raises:
        Undecodable: the bytes are not a valid message of this type (reason ``not_protobuf``).
    """
    try:
        return kind.FromString(raw)
    except DecodeError:
        raise Undecodable(
            "not_protobuf", f"expected an encoded {kind.DESCRIPTOR.name}, received {len(raw)} bytes of something else"
        ) from None


def printable(raw: bytes) -> str:
    """Returns bytes as text for a log: shortened, with escapes for invalid or unprintable bytes."""
    return escaped(raw[:_SHOWN_CHARACTERS].decode(errors="backslashreplace"))


def escaped(text: str, limit: int = _SHOWN_CHARACTERS) -> str:
    """Returns at most ``limit`` characters of a text, with escapes for unprintable ones.

    Not printable are control characters, marks of direction, invisible ones, and spaces other than the usual one.
    """
    shown = text if len(text) <= limit else f"{text[:limit]}..."
    if shown.isprintable():
        return shown
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in shown)


class Quarantine:
    """Entries skipped because they cannot be decoded.

    Each rejection is counted. An entry is logged when it is first rejected, and again when it becomes decodable or is
    deleted. May be used from any thread.
    """

    def __init__(self, count: Callable[[str, str], None] = lambda _source, _reason: None) -> None:
        """``count`` is called at every rejection with the source (``etcd``, ``nats``) and the reason."""
        self._count = count
        self._entries: dict[tuple[str, str], str] = {}

    @property
    def size(self) -> int:
        """Number of quarantined entries."""
        return len(self._entries)

    def reject(self, source: str, name: str, error: Undecodable) -> None:
        """Quarantines an entry.

        Args:
            source: Where the entry comes from: ``etcd`` or ``nats``.
            name: Its key or subject. The log has its beginning, with escapes.
            error: Why it cannot be used.
        """
        self._count(source, error.reason)
        known = self._entries.get((source, name))
        if known is None and len(self._entries) >= _MAX_ENTRIES:
            return
        self._entries[source, name] = error.reason
        if known is None:
            log.warning("entry.quarantined", source=source, name=escaped(name), reason=error.reason, detail=str(error))
            if len(self._entries) == _MAX_ENTRIES:
                log.warning("quarantine.full", entries=_MAX_ENTRIES)

    def release(self, source: str, name: str) -> None:
        """Releases a decodable or deleted entry."""
        if self._entries.pop((source, name), None) is not None:
            log.info("entry.released", source=source, name=escaped(name))

    def release_missing(self, source: str, prefix: str, present: Container[str]) -> None:
        """Releases the entries below a prefix outside of ``present``."""
        for known_source, name in list(self._entries):
            if known_source == source and name.startswith(prefix) and name not in present:
                self.release(source, name)
