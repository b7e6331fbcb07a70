"""One protocol for each service: what a caller holds, be it the object itself or a stub.

A unary method is a coroutine function; a streaming one returns an async generator, which the caller closes
(``contextlib.aclosing``) to cancel the call. Messages are treated as immutable. Every method raises
``kvrouter.runtime.errors.KvRouterError``. Where an object can answer in encoded form, it offers the same method with
``_encoded`` after its name, which yields or returns ``bytes``; the gRPC server prefers that one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol, TypeAlias, TypeVar

from kvrouter.runtime.deadline import Deadline
from kvrouter.v1 import frontend_pb2 as frontend
from kvrouter.v1 import indexer_pb2 as indexer
from kvrouter.v1 import scheduler_pb2 as scheduler
from kvrouter.v1 import worker_pb2 as worker

T = TypeVar("T")
Stream: TypeAlias = AsyncGenerator[T, None]
"""A stream of answers."""


class Indexer(Protocol):
    """Who holds which blocks. Meaning of every field: kvrouter/v1/indexer.proto."""

    async def find_matches(
        self, request: indexer.FindMatchesRequest, *, deadline: Deadline
    ) -> indexer.FindMatchesResponse:
        """The leading blocks of a request that each rank holds."""
        ...

    def dump(self, request: indexer.DumpRequest, *, deadline: Deadline) -> Stream[indexer.DumpResponse]:
        """The whole index of a component, rank by rank, in chunks."""
        ...

    async def get_stats(self, request: indexer.GetStatsRequest, *, deadline: Deadline) -> indexer.GetStatsResponse:
        """Figures of the index, its consumer and its ranks."""
        ...

    async def take_snapshot(
        self, request: indexer.TakeSnapshotRequest, *, deadline: Deadline
    ) -> indexer.TakeSnapshotResponse:
        """Takes a snapshot at once."""
        ...

    def verify(self, request: indexer.VerifyRequest, *, deadline: Deadline) -> Stream[indexer.VerifyResponse]:
        """Compares the index with the workers' own state."""
        ...

    async def resync(self, request: indexer.ResyncRequest, *, deadline: Deadline) -> indexer.ResyncResponse:
        """Replaces the state of ranks with what their workers hold."""
        ...

    async def reset_states(
        self, request: indexer.ResetStatesRequest, *, deadline: Deadline
    ) -> indexer.ResetStatesResponse:
        """Drops what the transport holds for a component, and refills the index from live workers."""
        ...

    async def load(self, requests: AsyncIterator[indexer.LoadRequest], *, deadline: Deadline) -> indexer.LoadResponse:
        """Loads a dump into the index."""
        ...


class Scheduler(Protocol):
    """Which rank a request goes to. Meaning of every field: kvrouter/v1/scheduler.proto."""

    async def select_worker(
        self, request: scheduler.SelectWorkerRequest, *, deadline: Deadline
    ) -> scheduler.SelectWorkerResponse:
        """Chooses a rank for a request; books its load in the same step if asked to."""
        ...

    async def mark_prefill_complete(
        self, request: scheduler.MarkPrefillCompleteRequest, *, deadline: Deadline
    ) -> scheduler.MarkPrefillCompleteResponse:
        """Says that a booking's prompt is computed."""
        ...

    async def report_output(
        self, request: scheduler.ReportOutputRequest, *, deadline: Deadline
    ) -> scheduler.ReportOutputResponse:
        """Says how many tokens a booking has generated."""
        ...

    async def free(self, request: scheduler.FreeRequest, *, deadline: Deadline) -> scheduler.FreeResponse:
        """Releases bookings. Freeing what is unknown is no error."""
        ...

    def session(
        self, requests: AsyncIterator[scheduler.SessionRequest], *, deadline: Deadline
    ) -> Stream[scheduler.SessionResponse]:
        """A session: bookings made in it live as long as the stream, and a grace after it."""
        ...

    async def get_potential_loads(
        self, request: scheduler.GetPotentialLoadsRequest, *, deadline: Deadline
    ) -> scheduler.GetPotentialLoadsResponse:
        """The load that each rank would have with a request."""
        ...

    async def set_busy_threshold(
        self, request: scheduler.SetBusyThresholdRequest, *, deadline: Deadline
    ) -> scheduler.SetBusyThresholdResponse:
        """Sets or reads the thresholds above which a rank is busy."""
        ...

    async def list_busy_thresholds(
        self, request: scheduler.ListBusyThresholdsRequest, *, deadline: Deadline
    ) -> scheduler.ListBusyThresholdsResponse:
        """Lists the thresholds of every model."""
        ...

    async def explain(self, request: scheduler.ExplainRequest, *, deadline: Deadline) -> scheduler.ExplainResponse:
        """The terms of every candidate in a past decision."""
        ...

    async def get_status(
        self, request: scheduler.GetStatusRequest, *, deadline: Deadline
    ) -> scheduler.GetStatusResponse:
        """What the Scheduler believes of its ranks, what it holds, and what it decided last."""
        ...


class Frontend(Protocol):
    """The gateway that clients speak to. Meaning of every field: kvrouter/v1/frontend.proto."""

    def generate(
        self, request: frontend.FrontendServiceGenerateRequest, *, deadline: Deadline
    ) -> Stream[frontend.FrontendServiceGenerateResponse]:
        """Routes a request, runs it, and streams its tokens."""
        ...

    async def best_worker(
        self, request: frontend.BestWorkerRequest, *, deadline: Deadline
    ) -> frontend.BestWorkerResponse:
        """The worker that a request would go to; with a booking, its load is booked and the caller must free it."""
        ...

    async def potential_loads(
        self, request: frontend.PotentialLoadsRequest, *, deadline: Deadline
    ) -> frontend.PotentialLoadsResponse:
        """The load that each rank would have with a request."""
        ...

    async def prefill_complete(
        self, request: frontend.PrefillCompleteRequest, *, deadline: Deadline
    ) -> frontend.PrefillCompleteResponse:
        """Says that the prompt of a booking made by BestWorker is computed."""
        ...

    async def release(self, request: frontend.ReleaseRequest, *, deadline: Deadline) -> frontend.ReleaseResponse:
        """Releases a booking made by BestWorker."""
        ...

    async def list_models(
        self, request: frontend.ListModelsRequest, *, deadline: Deadline
    ) -> frontend.ListModelsResponse:
        """Lists the models that are served."""
        ...

    async def get_worker_health(
        self, request: frontend.GetWorkerHealthRequest, *, deadline: Deadline
    ) -> frontend.GetWorkerHealthResponse:
        """What the Frontend knows of each worker's health."""
        ...


class Worker(Protocol):
    """An engine. Meaning of every field: kvrouter/v1/worker.proto."""

    def generate(
        self, request: worker.WorkerServiceGenerateRequest, *, deadline: Deadline
    ) -> Stream[worker.WorkerServiceGenerateResponse]:
        """Runs a request and streams its tokens. Cancelling the call aborts the request."""
        ...

    async def abort(self, request: worker.AbortRequest, *, deadline: Deadline) -> worker.AbortResponse:
        """Aborts requests by id. Unknown ids are counted, not refused."""
        ...

    def get_rank_state(
        self, request: worker.GetRankStateRequest, *, deadline: Deadline
    ) -> Stream[worker.GetRankStateResponse]:
        """The state of one rank, for whoever must repair: chunks that together replace the rank's state."""
        ...

    def get_events(self, request: worker.GetEventsRequest, *, deadline: Deadline) -> Stream[worker.GetEventsResponse]:
        """Events of one rank that the worker still holds, from a given id."""
        ...

    async def get_load(self, request: worker.GetLoadRequest, *, deadline: Deadline) -> worker.GetLoadResponse:
        """Load of every rank."""
        ...
