"""Which messages of a component's stream are event batches of the component.

The core parses a batch once, and judges its events when it applies them. Validation judges the envelope: whether the
message can be read, is of the rank whose subject it came on, and counts in blocks of the component's size.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass

from kvrouter.core import EventBatch, Rank, RefusedBatch

_RANK_OF_SUBJECT = re.compile(r"\.([0-9a-f]{16})\.([0-9]{1,10})$")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a message is quarantined."""

    reason: str
    """One of ``unparsable``, ``subject``, ``rank``, ``block_size``, ``unfit_worker``."""
    detail: str
    """What was found and what was expected, for a person."""


def rank_of_subject(subject: str) -> Rank | None:
    """Returns the rank that a subject of events names; None if it names none."""
    match = _RANK_OF_SUBJECT.search(subject)
    return (int(match.group(1), 16), int(match.group(2))) if match else None


def validate(
    subject: str, data: bytes, block_size: int, unfit_workers: Container[int] = frozenset()
) -> EventBatch | Refusal:
    """Returns the batch in a message, or why it is quarantined.

    Args:
        subject: Subject that the message came on.
        data: The message.
        block_size: Tokens per block in the component.
        unfit_workers: Workers whose registration differs from the component.
    """
    rank = rank_of_subject(subject)
    try:
        batch = EventBatch(data) if rank is None else EventBatch(data, rank, block_size)
    except RefusedBatch as error:
        return Refusal(error.reason, str(error))
    if rank is None:
        return Refusal("subject", f"expected a subject that names a rank, received {subject!r}")
    if rank[0] in unfit_workers:
        return Refusal(
            "unfit_worker", f"worker {rank[0]} is registered with properties that its component does not have"
        )
    return batch
