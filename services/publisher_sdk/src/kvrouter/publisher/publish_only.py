"""The engine of a publish-only worker: requests reach the real engine by another way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import grpc
from kvrouter.publisher.errors import RequestRefused
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.worker_pb2 import WorkerServiceGenerateRequest


class PublishOnly:
    """Refuses requests and reports no load."""

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
