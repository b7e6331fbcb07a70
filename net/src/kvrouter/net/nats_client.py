"""A NATS client that survives messages with undecodable subjects and headers.

The client library decodes both while it reads from the connection, and stops reading where that fails: the connection
is deaf until pings time out, and a message in a stream that is delivered again makes it deaf again.
"""

from __future__ import annotations

from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg

_JETSTREAM_DELIVERY = b"$JS.ACK."
_STATUS = "Status"


class TolerantClient(Client):
    """Delivers every message: escapes undecodable bytes in its subject, and drops headers that cannot be parsed."""

    async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
        try:
            parsed: dict[str, str] | None = await super()._process_headers(headers)
        except (ValueError, IndexError):
            return None
        return parsed

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        # Only the server itself sends statuses, and those need no acknowledgement. A stored message that claims to be
        # one would be skipped as such, and delivered again without end.
        if headers and reply.startswith(_JETSTREAM_DELIVERY):
            headers.pop(_STATUS, None)
        message: Any = super()._build_message(sid, _escaped(subject), _escaped(reply), data, headers)
        return message  # type: ignore[no-any-return]


def _escaped(raw: bytes) -> bytes:
    return raw.decode(errors="backslashreplace").encode()
