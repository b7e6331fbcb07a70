"""A NATS client that survives messages with undecodable subjects and headers.

The client library decodes both in its read loop and stops reading if that fails. The connection then receives nothing
until its pings time out, and a redelivered stream message stops it again.

Of headers it parses only those that begin with a status of the server. kvrouter reads no others, and to parse the id
and the stream that come with each event took longer than to apply the event.
"""

from __future__ import annotations

from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg

_JETSTREAM_DELIVERY = b"$JS.ACK."
_STATUS = "Status"
_STATUS_LINE = b"NATS/1.0 "


class TolerantClient(Client):
    """Delivers every message, with its headers if they have a status. Escapes undecodable bytes of its subject."""

    async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
        if headers is None or not headers.startswith(_STATUS_LINE):
            return None
        try:
            parsed: dict[str, str] | None = await super()._process_headers(headers)
        except (ValueError, IndexError):
            return None
        return parsed

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        # Only the server itself sends statuses, and those need no acknowledgement. The library would skip a stored
        # message that has this header, and the server would deliver it again forever.
        if headers and reply.startswith(_JETSTREAM_DELIVERY):
            headers.pop(_STATUS, None)
        message: Any = super()._build_message(sid, _escaped(subject), _escaped(reply), data, headers)
        return message  # type: ignore[no-any-return]


def _escaped(raw: bytes) -> bytes:
    return raw if raw.isascii() else raw.decode(errors="backslashreplace").encode()
