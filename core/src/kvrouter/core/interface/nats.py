"""Messages of the NATS protocol."""

from __future__ import annotations

NatsMessage = tuple[int, bytes, bytes, bytes, bytes | None]
"""(subscription id, subject, reply subject, content, headers) of a message; empty without a reply subject, None without
headers."""
