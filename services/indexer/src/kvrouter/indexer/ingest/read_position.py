"""Decides where a replica continues in the stream, from its own position and the server's state, without I/O.

Each rank has its own cursor (incarnation, event id): applying a message twice changes nothing, and a missing message
shows as a gap. So in any doubt the replica reads from the first message again, and keeps its index meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class StreamIdentity:
    """Identifies a stream. A recreated stream is another one."""

    name: str
    created_unix_ns: int
    """Creation time, nanoseconds since 1970 in whole microseconds."""


@dataclass(frozen=True, slots=True)
class StreamView:
    """State of a stream as the server reports it."""

    identity: StreamIdentity
    last_sequence: int
    """Sequence of the newest message ever stored."""
    first_sequence: int = 1
    """Sequence of the oldest message still stored; one after the last if there is none."""


@dataclass(frozen=True, slots=True)
class ConsumerView:
    """State of a durable consumer as the server reports it."""

    created_unix_ns: int
    delivered_stream_sequence: int
    """All messages up to this stream sequence were delivered, or deleted before they could be."""
    pending: int
    """Number of undelivered messages in the stream."""


class Position(msgspec.Struct, frozen=True):
    """How far a replica has applied a stream, and by which consumer."""

    identity: StreamIdentity
    applied: int
    """Sequence of the last message applied; 0 for none."""
    consumer_created_unix_ns: int


@dataclass(frozen=True, slots=True)
class Recreate:
    """The consumer must be recreated."""

    start_sequence: int
    """Stream sequence at which the new consumer starts, 1 or more."""
    reason: str


def plan(
    position: Position | None, stream: StreamView, consumer: ConsumerView | None, *, same_message: bool | None
) -> Recreate | None:
    """Returns how the consumer must be recreated; None if the replica reads on. No delivery may be in flight.

    Args:
        position: Its position; None at its start.
        stream: State of the stream.
        consumer: State of its consumer; None if there is none.
        same_message: Whether the message at ``position.applied`` is the applied one; None if it is gone or
            no message was applied.
    """
    if position is None:
        return Recreate(1, "start")
    if stream.identity != position.identity:
        return Recreate(1, "another stream")
    if stream.last_sequence < position.applied or same_message is False:
        return Recreate(1, "stream was rolled back")
    if consumer is None:
        return Recreate(position.applied + 1, "consumer lost")
    if consumer.created_unix_ns != position.consumer_created_unix_ns:
        return Recreate(position.applied + 1, "another consumer")
    if consumer.delivered_stream_sequence > stream.last_sequence:
        return Recreate(position.applied + 1, "consumer is past the end")
    if consumer.delivered_stream_sequence > position.applied:
        # The server delivers them again, but only after the acknowledgement timeout.
        return Recreate(position.applied + 1, "messages lost on the way")
    return None


def is_behind(position: Position, stream: StreamView) -> bool:
    """Returns whether the replica's next messages are gone from the stream, so that a newer snapshot can help."""
    return stream.identity != position.identity or stream.first_sequence > position.applied + 1


def is_caught_up(target: int, applied: int, pending: int) -> bool:
    """Returns whether a replica has read all messages in the stream as of its start.

    Args:
        target: Last sequence of the stream at the replica's start.
        applied: Sequence of the last message applied.
        pending: Number of messages in the stream after it. 0 means caught up even below the target, because
            messages may have expired.
    """
    return applied >= target or pending == 0
