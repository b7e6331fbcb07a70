"""Converts ranks and components from and to messages, and checks booking keys."""

from __future__ import annotations

from typing import Protocol

from kvrouter.core import Rank
from kvrouter.runtime.booking_updates import Key, key_of
from kvrouter.runtime.requests import check_request_id
from kvrouter.v1 import common_pb2
from kvrouter.v1.common_pb2 import BookingKey, Component, Stage
from kvrouter.v1.errors import BadRequest
from kvrouter.v1.names import ComponentName

MAX_REQUEST_ID_BYTES = 128
_STAGES = frozenset(Stage.values())


def checked_key(booking: BookingKey) -> Key:
    """Returns the checked key of a message.

    Raises:
        BadRequest: the request id is empty or too long or has control characters, or there is no such stage.
    """
    key = key_of(booking)
    check_key(key)
    return key


def check_key(key: Key) -> None:
    """Checks a key.

    Raises:
        BadRequest: the request id is empty or too long or has control characters, or there is no such stage.
    """
    request_id, _, stage = key
    if not request_id:
        raise BadRequest(
            "the request id is empty", field="booking.request_id", advice=f"Send 1 to {MAX_REQUEST_ID_BYTES} bytes."
        )
    check_request_id(request_id, MAX_REQUEST_ID_BYTES, "booking.request_id")
    if stage not in _STAGES:
        raise BadRequest(f"unknown stage {stage}", field="booking.stage", advice="Send a stage of the contract.")


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
