"""Reads whole messages of the NATS protocol, as nearly all that a client receives are."""

from __future__ import annotations

from kvrouter.core.interface import NatsMessage

_MAX_DIGITS = 9
"""Digits of a number that is read. Longer ones are left to others."""


def read_nats_messages(data: bytes) -> list[tuple[int, NatsMessage]]:
    """Returns the messages at the beginning of the input, up to anything else, and where each ends."""
    messages: list[tuple[int, NatsMessage]] = []
    at = 0
    while (line_end := data.find(b"\r\n", at)) > at:
        try:
            operation, subject, sid, *reply, size = data[at:line_end].split()
            number, begin = _number(sid), line_end + 2
            content = begin + _number(reply.pop()) if operation == b"HMSG" else begin
            end = begin + _number(size)
        except (ValueError, IndexError):
            break
        is_message = operation in (b"HMSG", b"MSG") and len(reply) < 2
        if not is_message or not content <= end <= len(data) - 2:
            break
        at = end + 2
        to = reply[0] if reply else b""
        messages.append((at, (number, subject, to, data[content:end], data[begin:content] or None)))
    return messages


def _number(digits: bytes) -> int:
    if len(digits) > _MAX_DIGITS or not digits.isdigit():
        raise ValueError(digits)
    return int(digits)
