"""What the sidecar needs of an engine's HTTP API, whichever engine it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Protocol

import msgspec
from kvrouter.engines.servers.description import Discovered, EngineDescription
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.worker_pb2 import FinishReason, GenerateOutput, WorkerServiceGenerateRequest

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_FINISH = {
    "stop": FinishReason.FINISH_REASON_STOP,
    "length": FinishReason.FINISH_REASON_LENGTH,
    "abort": FinishReason.FINISH_REASON_ABORT,
    "error": FinishReason.FINISH_REASON_ERROR,
    "tool_calls": FinishReason.FINISH_REASON_TOOL_CALLS,
    "content_filter": FinishReason.FINISH_REASON_CONTENT_FILTER,
}


def finish_reason(said: str) -> FinishReason:
    """Returns why a generation ended. Newer engines may have further reasons, which are all kinds of a regular end."""
    return _FINISH.get(said, FinishReason.FINISH_REASON_STOP)


class OutputReader(Protocol):
    """Reads the answer to one request."""

    def read(self, data: bytes) -> Iterator[GenerateOutput]:
        """Yields the outputs of one event of a stream, or of a whole answer without a stream.

        Raises:
            RequestRefused: it reports an error, or is malformed.
        """

    def end(self) -> Iterator[GenerateOutput]:
        """Yields what was kept for the last output, once the answer has ended.

        Raises:
            RequestRefused: the answer ended before the generation did.
        """


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One request, as the engine takes it."""

    path: str
    body: bytes
    outputs: OutputReader
    headers: Mapping[str, str] = field(default_factory=dict)
    engine_id: str = ""
    """Id to abort the request by; empty if closing the connection aborts it."""
    early: GenerateOutput | None = None
    """Output before the engine answers: where a decode worker that must run at the same time meets this request."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """What changes while an engine runs."""

    lora_names: tuple[str, ...] = ()
    """Names of its LoRA adapters, in order."""
    is_asleep: bool = False
    """Whether it computes nothing until it is woken."""


class EngineApi(Protocol):
    """The HTTP API of one engine."""

    async def discover(self) -> Discovered:
        """Returns what the engine says of itself.

        Raises:
            EngineAway: the engine does not answer, or is not ready yet.
        """

    async def state(self) -> EngineState:
        """Returns the engine's state.

        Raises:
            EngineAway: the engine does not answer.
            UnexpectedAnswer: it answered with something else.
        """

    async def loads(self, engine: EngineDescription) -> tuple[dict[int, LoadReport], int]:
        """Returns the load of each rank that the engine reports, and how many values were unusable.

        Raises:
            EngineAway: the engine does not answer.
            UnexpectedAnswer: it answered with something else.
        """

    def read_pushed_load(self, payload: bytes, engine: EngineDescription) -> tuple[int, LoadReport]:
        """Returns rank and load of a message that the engine published on its sockets for load.

        Raises:
            MalformedMessage: it is none, or of an engine that publishes no load.
        """

    def call(self, request: WorkerServiceGenerateRequest, engine: EngineDescription) -> EngineCall:
        """Returns a request as the engine takes it.

        Raises:
            RequestRefused: the engine cannot serve it.
        """

    async def abort(self, engine_id: str) -> None:
        """Aborts a request at the engine.

        Raises:
            EngineAway: the engine does not answer.
            UnexpectedAnswer: it refuses.
        """
