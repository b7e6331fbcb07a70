"""The interfaces of an engine for the SDK: it emits the outputs of each step, or streams each request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import grpc
from kvrouter.publisher.errors import RequestRefused
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.worker_pb2 import GenerateOutput, WorkerServiceGenerateRequest


@runtime_checkable
class StepEngine(Protocol):
    """An engine with one call of ``Worker.emit`` for the outputs of a step."""

    def submit(self, request: WorkerServiceGenerateRequest) -> None:
        """Starts a request and returns at once. Runs on the event loop.

        The engine emits its output under ``request.request_id``, which no other request has, until one with a finish
        reason.

        Raises:
            RequestRefused: the request cannot be served.
        """

    async def abort(self, request_ids: Sequence[str]) -> int:
        """Aborts requests and returns how many of them were running; also called when a caller disconnects.

        The SDK has ended them already. Further output of them is dropped.
        """

    def load(self) -> Mapping[int, LoadReport]:
        """Returns the load by data-parallel rank. The SDK fills in rank, incarnation and time."""


class Engine(Protocol):
    """An engine with a stream of output for each request. ``StepEngine`` costs less per token."""

    def generate(self, request: WorkerServiceGenerateRequest) -> AsyncIterator[GenerateOutput]:
        """Runs a request, as an async generator. It is closed early if the caller disconnects.

        Raises:
            RequestRefused: the request cannot be served.
        """

    async def abort(self, request_ids: Sequence[str]) -> int:
        """Aborts requests and returns how many of them were running; also called when a caller disconnects."""

    def load(self) -> Mapping[int, LoadReport]:
        """Returns the load by data-parallel rank. The SDK fills in rank, incarnation and time."""


class PublishOnly:
    """The engine of a publish-only worker: requests reach the real engine by another way."""

    def submit(self, request: WorkerServiceGenerateRequest) -> None:  # noqa: ARG002
        """Raises RequestRefused."""
        raise RequestRefused(
            "this worker publishes the cache of an engine and serves no requests",
            code=grpc.StatusCode.FAILED_PRECONDITION,
            advice="Send requests to the engine's own address.",
            retry_elsewhere=True,
        )

    async def abort(self, request_ids: Sequence[str]) -> int:  # noqa: ARG002
        """Returns 0: nothing runs."""
        return 0

    def load(self) -> Mapping[int, LoadReport]:
        """Returns no load."""
        return {}
