"""Where in the stream a replica reads on: decided from its own position and from what the server says.

Truth is per rank (incarnation and event id): a message applied twice changes nothing, and one that is missing shows as
a gap. So when in doubt the answer is to read from the first message again; the index is kept meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StreamIdentity:
    """Which stream it is: a stream that was deleted and made again is another one."""

    name: str
    created_unix_ns: int
    """Creation time, nanoseconds since 1970, whole microseconds."""


@dataclass(frozen=True, slots=True)
class StreamView:
    """A stream as the server shows it."""

    identity: StreamIdentity
    last_sequence: int
    """Sequence of the newest message ever stored."""
    first_sequence: int = 1
    """Sequence of the oldest message that is still there; one past the last where none is."""


@dataclass(frozen=True, slots=True)
class ConsumerView:
    """A durable consumer as the server shows it."""

    created_unix_ns: int
    delivered_stream_sequence: int
    """Everything up to this stream sequence is given out, or was gone before it could be."""
    pending: int
    """Messages of the stream that it has not given out."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far a replica has applied a stream, and with which consumer."""

    identity: StreamIdentity
    applied: int
    """Sequence of the last message applied; 0 for none."""
    consumer_created_unix_ns: int


@dataclass(frozen=True, slots=True)
class ReadOn:
    """The consumer continues where the replica stands."""


@dataclass(frozen=True, slots=True)
class Recreate:
    """The consumer must be made anew."""

    start_sequence: int
    """Sequence of its first message, 1 or more."""
    reason: str


Plan = ReadOn | Recreate


def plan(
    position: Position | None, stream: StreamView, consumer: ConsumerView | None, *, same_message: bool | None
) -> Plan:
    """How a replica reads on.

    Args:
        position: Where it stands; None at its start.
        stream: The stream.
        consumer: Its consumer; None if there is none.
        same_message: Whether the message at ``position.applied`` is the one that was applied; None if it is gone, or
            none has been.

    It is asked while no delivery is under way.
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
        # The server would give them out again, but only when it has waited for their acknowledgement.
        return Recreate(position.applied + 1, "messages lost on the way")
    return ReadOn()


def is_behind(position: Position, stream: StreamView) -> bool:
    """Whether messages that the replica would read next are gone, so that a later snapshot is worth a look."""
    return stream.identity != position.identity or stream.first_sequence > position.applied + 1


@dataclass(slots=True)
class DeliveryOrder:
    """Watches that no delivery is lost on the way: a consumer numbers what it gives out from 1 on.

    A lost delivery would look like a gap in the events of a rank; the stream still has the message.
    """

    last: int = 0

    def follows(self, consumer_sequence: int) -> bool:
        """Notes a delivery; False if one is missing before it, which leaves the count as it was."""
        if consumer_sequence != self.last + 1:
            return False
        self.last = consumer_sequence
        return True


@dataclass(slots=True)
class CatchUp:
    """Whether a replica has read all that the stream held when it started."""

    target: int
    """Last sequence of the stream at the start."""
    done: bool = False

    def reached(self, applied: int, pending: int) -> bool:
        """True once caught up, and from then on.

        Args:
            applied: Sequence of the last message applied.
            pending: Messages of the stream after it. None pending means done even below the target:
                messages may have expired since.
        """
        self.done = self.done or applied >= self.target or pending == 0
        return self.done
