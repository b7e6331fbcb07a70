"""Converts ranks, components and booking keys from and to messages."""

from __future__ import annotations

from collections.abc import Container
from typing import Protocol

from kvrouter.core import Rank
from kvrouter.runtime.requests import check_request_id
from kvrouter.v1 import common_pb2
from kvrouter.v1.common_pb2 import BookingKey, Component, Stage
from kvrouter.v1.errors import BadRequest
from kvrouter.v1.names import ComponentName

_WHOLE = Stage.STAGE_WHOLE  # read once: looking up an enum value by name takes a third of a microsecond

Key = tuple[str, int, Stage]
"""(request_id, attempt, stage), the stage never unspecified."""


MAX_REQUEST_ID_BYTES = 128
_STAGES = frozenset(Stage.values())


def key_of(key: BookingKey) -> Key:
    """Returns the key of a message, which can be hashed."""
    return (key.request_id, key.attempt, key.stage or _WHOLE)


def checked_key(booking: BookingKey, known: Container[Key] = ()) -> Key:
    """Returns the checked key of a message. Keys in ``known`` have been checked before.

    Raises:
        BadRequest: the request id is empty or too long or has control characters, or there is no such stage.
    """
    key = request_id, _, stage = key_of(booking)
    if key in known:
        return key
    if not request_id:
        raise BadRequest(
            "the request id is empty", field="booking.request_id", advice=f"Send 1 to {MAX_REQUEST_ID_BYTES} bytes."
        )
    check_request_id(request_id, MAX_REQUEST_ID_BYTES, "booking.request_id")
    if stage not in _STAGES:
        raise BadRequest(f"unknown stage {stage}", field="booking.stage", advice="Send a stage of the contract.")
    return key


class OfRank(Protocol):
    """A message with a rank."""

    @property
    def rank(self) -> common_pb2.Rank:
        """Returns the rank."""


def rank_message(rank: Rank) -> common_pb2.Rank:
    """Returns a rank as a message."""
    return common_pb2.Rank(worker_id=rank[0], dp_rank=rank[1])


def rank_of(message: OfRank) -> Rank:
    """Returns the rank in a message."""
    return (message.rank.worker_id, message.rank.dp_rank)


def component_message(name: ComponentName) -> Component:
    """Returns a component as a message."""
    return Component(namespace=name.namespace, name=name.name)


def key_message(key: Key) -> BookingKey:
    """Returns a key as a message."""
    request_id, attempt, stage = key
    return BookingKey(request_id=request_id, attempt=attempt, stage=stage)
