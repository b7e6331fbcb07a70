"""What a message on a component's stream must be before the index sees it.

The index judges the events of a batch; screening judges the envelope: whether the message can be read, speaks of the
rank whose subject it came on, and counts in blocks of the component's size.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass

from kvrouter.core import Rank
from kvrouter.net.decoding import Undecodable, decode_message
from kvrouter.v1.events_pb2 import KvEventBatch

_RANK_OF_SUBJECT = re.compile(r"\.([0-9a-f]{16})\.([0-9]{1,10})$")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a message is quarantined."""

    reason: str
    """One of ``unparsable``, ``subject``, ``rank``, ``block_size``, ``unfit_worker``."""
    detail: str
    """What was found and what was expected, for a person."""


def rank_of_subject(subject: str) -> Rank | None:
    """The rank that a subject of events names; None if it names none."""
    match = _RANK_OF_SUBJECT.search(subject)
    return (int(match.group(1), 16), int(match.group(2))) if match else None


def validate(
    subject: str, data: bytes, block_size: int, unfit_workers: Container[int] = frozenset()
) -> KvEventBatch | Refusal:
    """The batch in a message, or why it is quarantined.

    Args:
        subject: Subject that the message came on.
        data: The message.
        block_size: Tokens per block in the component.
        unfit_workers: Workers whose registration differs from the component.
    """
    try:
        batch = decode_message(KvEventBatch, data)
    except Undecodable as error:
        return Refusal("unparsable", str(error))
    rank = rank_of_subject(subject)
    if rank is None:
        return Refusal("subject", f"{subject!r} names no rank")
    if rank != (batch.worker_id, batch.dp_rank):
        return Refusal("rank", f"subject names rank {rank}, the batch rank {(batch.worker_id, batch.dp_rank)}")
    if batch.block_size != block_size:
        return Refusal("block_size", f"blocks of {batch.block_size} tokens, the component has {block_size}")
    if batch.worker_id in unfit_workers:
        return Refusal("unfit_worker", f"worker {batch.worker_id} is registered with what its component has otherwise")
    return batch
