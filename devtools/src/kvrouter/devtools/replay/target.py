"""What a replay sends its requests to."""

from __future__ import annotations

from typing import Protocol, TypeVar

from kvrouter.devtools.replay.records import RequestRecord
from kvrouter.devtools.traces.reader import TraceRequest

Prepared = TypeVar("Prepared")


class Target(Protocol[Prepared]):
    """A router or engine, for example ``FrontendTarget`` or ``OpenAiTarget``."""

    def prepare(self, request: TraceRequest) -> Prepared:
        """Returns what ``send`` sends for a request. Called before the request is due, since expansion takes time."""

    async def send(self, prepared: Prepared, record: RequestRecord) -> None:
        """Sends a request and fills its record until the response ends. A failure is recorded, not raised."""
