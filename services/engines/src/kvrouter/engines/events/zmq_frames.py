"""Messages on the ZMQ sockets of vLLM's and SGLang's KV events, without the sockets.

A PUB message has the frames ``[topic, sequence, payload]``. A replay is requested from a DEALER with
``[b"", first sequence]`` and answered by messages ending with ``[sequence, payload]`` and have an empty frame, or an
empty frame and the topic, before. A message with the sequence ``END_OF_REPLAY`` and an empty payload ends the answer.
Sequences are u64, big-endian, and start at 0 in each publisher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

END_OF_REPLAY = (1 << 64) - 1
"""Sequence at the end of a replay; -1 as i64."""


class MalformedMessage(ValueError):
    """Frames are not a message of these sockets; the message of the exception says why."""


class EventMessage(NamedTuple):
    """A message of an engine."""

    sequence: int
    payload: bytes
    """A batch of events, in msgpack."""


def read_published(frames: Sequence[bytes], topic: bytes | None = None) -> EventMessage | None:
    """Returns a message of a PUB socket; None if it has another topic than ``topic``.

    Raises:
        MalformedMessage: the frames are none.
    """
    if len(frames) != 3:
        raise MalformedMessage(f"expected the frames topic, sequence and payload, received {len(frames)} frames")
    if topic is not None and frames[0] != topic:
        return None
    return EventMessage(_sequence(frames[1]), frames[2])


def read_replayed(frames: Sequence[bytes]) -> EventMessage | None:
    """Returns a message of an answer to a replay request; None for the last one.

    Raises:
        MalformedMessage: the frames are none.
    """
    if len(frames) not in (3, 4) or frames[0]:
        raise MalformedMessage(f"expected 3 or 4 frames of which the first is empty, received {len(frames)} frames")
    sequence = _sequence(frames[-2])
    if sequence == END_OF_REPLAY and not frames[-1]:
        return None
    return EventMessage(sequence, frames[-1])


def read_replay_request(frames: Sequence[bytes]) -> tuple[bytes, int]:
    """Returns the identity of the requester and the first requested sequence, as a ROUTER receives them.

    Raises:
        MalformedMessage: the frames are no request.
    """
    if len(frames) != 3 or frames[1]:
        raise MalformedMessage(f"expected the frames identity, empty and sequence, received {len(frames)} frames")
    return frames[0], _sequence(frames[2])


def encode_sequence(sequence: int) -> bytes:
    """Returns the frame of a sequence."""
    return sequence.to_bytes(8, "big")


def _sequence(frame: bytes) -> int:
    if len(frame) != 8:
        raise MalformedMessage(f"expected a sequence of 8 bytes, received {len(frame)} bytes")
    return int.from_bytes(frame, "big")
