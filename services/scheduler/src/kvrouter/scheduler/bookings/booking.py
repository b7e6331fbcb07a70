"""A live booking: a request's load on a rank, and the Schedulers that own it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvrouter.core import Rank
from kvrouter.scheduler.identifiers import Key
from kvrouter.scheduler.load.pools import Pool
from kvrouter.scheduler.request.prompt import Prompt
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import SelectWorkerResponse

SchedulerIncarnation = tuple[int, str]
"""A Scheduler process: (incarnation, id)."""


class Placement(NamedTuple):
    """The rank on which a Scheduler booked a request, with the prefill tokens there."""

    rank: Rank
    prefill_tokens: int


@dataclass(slots=True, eq=False)
class Booking:
    """A live booking. Only the booking table and the leases change it."""

    key: Key
    pool: Pool = field(repr=False)
    prompt: Prompt
    """Without local hashes, unless overlaps are predicted."""
    placement: Placement
    """The placement at which its load counts: that of its greatest owner."""
    outcome: SelectWorkerResponse
    """The response to the selection."""
    audited: bool = False
    """Whether an Indexer predicted its overlap, so that the prediction can be compared with the worker's count."""
    most_overlap_blocks: int = 0
    """Overlap of the rank that held most of the prompt, if ``audited``."""
    session_id: str = ""
    """Session at this Scheduler that owns it; empty for a lease."""
    lease_seconds: float = 0.0
    """Time until it expires after the last call that names it, in seconds; unused in a session."""
    lease_until: float = 0.0
    conversation: bytes = b""
    """Digest of its conversation; empty for none."""
    prefilled: bool = False
    output_tokens: int = 0
    has_local_progress: bool = False
    """Whether its progress was reported here while only other Schedulers owned it, so that they learn it from here."""
    owners: dict[SchedulerIncarnation, Placement] = field(default_factory=dict)
    """The Schedulers that own it, each with the placement that it chose."""

    @property
    def component(self) -> ComponentName:
        """Returns the component of its rank."""
        return self.pool.name

    @property
    def rank(self) -> Rank:
        """Returns the rank on which its load counts."""
        return self.placement.rank
