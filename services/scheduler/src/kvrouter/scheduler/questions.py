"""A request on its way to a decision."""

from __future__ import annotations

from dataclasses import dataclass

from kvrouter.scheduler.candidates import Wanted
from kvrouter.scheduler.options import RoutingOptions
from kvrouter.scheduler.overlaps import NOT_ASKED, Overlaps
from kvrouter.scheduler.pools import Pool
from kvrouter.scheduler.prompts import Prompt
from kvrouter.scheduler.slots import Key
from kvrouter.v1.scheduler_pb2 import RoutingRequest


@dataclass(frozen=True, slots=True)
class Question:
    """A request, checked and ready to be decided."""

    pool: Pool
    prompt: Prompt
    wanted: Wanted
    options: RoutingOptions


@dataclass(slots=True)
class Asked:
    """A question with what its booking needs."""

    question: Question
    routing: RoutingRequest
    key: Key | None
    """None chooses without booking."""
    session_id: str = ""
    """Session that is to own the booking; empty for a lease."""
    lease_seconds: float = 0.0
    overlaps: Overlaps = NOT_ASKED
    """What the ranks hold of the prompt; the last answer, where it was asked for again."""
