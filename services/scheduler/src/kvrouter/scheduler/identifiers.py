"""Ranks, components and keys of bookings as the contract has them."""

from __future__ import annotations

from typing import Protocol, cast

from kvrouter.core import Rank
from kvrouter.v1 import common_pb2
from kvrouter.v1.common_pb2 import BookingKey, Component, Stage
from kvrouter.v1.names import ComponentName

Key = tuple[str, int, int]
"""(request_id, attempt, stage), the stage never unspecified."""


def stage_of(key: BookingKey) -> Stage:
    """The stage that a booking pays for."""
    return key.stage or Stage.STAGE_WHOLE


def key_of(key: BookingKey) -> Key:
    """A booking's key as a value that can be hashed."""
    return (key.request_id, key.attempt, stage_of(key))


class OfRank(Protocol):
    """A message that names a rank."""

    @property
    def rank(self) -> common_pb2.Rank:
        """It."""
        ...


def rank_message(rank: Rank) -> common_pb2.Rank:
    """A rank as the contract has it."""
    return common_pb2.Rank(worker_id=rank[0], dp_rank=rank[1])


def rank_of(message: OfRank) -> Rank:
    """The rank that a message names."""
    return (message.rank.worker_id, message.rank.dp_rank)


def component_message(name: ComponentName) -> Component:
    """A component as the contract has it."""
    return Component(namespace=name.namespace, name=name.name)


def key_message(key: Key) -> BookingKey:
    """A key as the contract has it."""
    request_id, attempt, stage = key
    return BookingKey(request_id=request_id, attempt=attempt, stage=cast(Stage, stage))
