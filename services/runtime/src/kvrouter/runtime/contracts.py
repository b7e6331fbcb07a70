"""One protocol per service, which both the service's object and its stub implement.

A unary method is a coroutine function; one without waiting is a plain function of the object, and its stub returns an
awaitable (``Immediate``). A streaming one returns an async generator, which the caller closes (``contextlib.aclosing``)
to cancel the call. Messages must not be modified. Every method raises ``kvrouter.v1.errors.KvRouterError``. An
object that can answer in encoded form has a second method with the suffix ``_encoded``, which yields or returns
``bytes``; the gRPC server prefers it. A plain function with a parameter ``connection`` receives the call stream
that carries the call. The .proto files define every field.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Protocol, TypeAlias, TypeVar

from google.protobuf.descriptor import ServiceDescriptor
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1 import (
    frontend_pb2 as frontend,
    indexer_pb2 as indexer,
    scheduler_pb2 as scheduler,
    sync_pb2 as sync,
    worker_pb2 as worker,
)

SERVICES: Mapping[str, ServiceDescriptor] = MappingProxyType(
    {
        "indexer": indexer.DESCRIPTOR.services_by_name["IndexerService"],
        "scheduler": scheduler.DESCRIPTOR.services_by_name["SchedulerService"],
        "frontend": frontend.DESCRIPTOR.services_by_name["FrontendService"],
        "worker": worker.DESCRIPTOR.services_by_name["WorkerService"],
    }
)
"""Services by the role of their processes."""

T = TypeVar("T")
Stream: TypeAlias = AsyncGenerator[T, None]
"""A stream of responses."""
Immediate: TypeAlias = T | Awaitable[T]
"""The response of a method without waiting: as it is from the object, awaitable from a stub."""


class Connection(Protocol):
    """The connection of a client's calls; the same object for all calls of one connection."""

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Calls the callback once the connection has ended."""


class Indexer(Protocol):
    """Answers which rank has which blocks. Fields: kvrouter/v1/indexer.proto."""

    async def find_matches(
        self, request: indexer.FindMatchesRequest, *, deadline: Deadline
    ) -> indexer.FindMatchesResponse:
        """Returns how many leading blocks of a request each rank has."""

    def dump(self, request: indexer.DumpRequest, *, deadline: Deadline) -> Stream[indexer.DumpResponse]:
        """Yields the whole index of a component in chunks, rank by rank."""

    async def get_stats(self, request: indexer.GetStatsRequest, *, deadline: Deadline) -> indexer.GetStatsResponse:
        """Returns statistics of the index, its consumer and its ranks."""

    async def take_snapshot(
        self, request: indexer.TakeSnapshotRequest, *, deadline: Deadline
    ) -> indexer.TakeSnapshotResponse:
        """Takes a snapshot now."""

    def verify(self, request: indexer.VerifyRequest, *, deadline: Deadline) -> Stream[indexer.VerifyResponse]:
        """Compares the index with the state of the workers."""

    async def resync(self, request: indexer.ResyncRequest, *, deadline: Deadline) -> indexer.ResyncResponse:
        """Replaces the state of ranks by that of their workers."""

    async def reset_states(
        self, request: indexer.ResetStatesRequest, *, deadline: Deadline
    ) -> indexer.ResetStatesResponse:
        """Drops the events stored for a component, and rebuilds its index from live workers."""

    async def load(self, requests: AsyncIterator[indexer.LoadRequest], *, deadline: Deadline) -> indexer.LoadResponse:
        """Loads a dump into the index."""


class Scheduler(Protocol):
    """Chooses ranks for requests and accounts for their load. Fields: kvrouter/v1/scheduler.proto."""

    async def select_worker(
        self, request: scheduler.SelectWorkerRequest, *, deadline: Deadline
    ) -> scheduler.SelectWorkerResponse:
        """Chooses a rank for a request, and books its load if the request names a booking."""

    async def mark_prefill_complete(
        self, request: scheduler.MarkPrefillCompleteRequest, *, deadline: Deadline
    ) -> scheduler.MarkPrefillCompleteResponse:
        """Marks the prefill of a booking as complete."""

    async def report_output(
        self, request: scheduler.ReportOutputRequest, *, deadline: Deadline
    ) -> scheduler.ReportOutputResponse:
        """Reports how many tokens a booking's request has generated."""

    async def free(self, request: scheduler.FreeRequest, *, deadline: Deadline) -> scheduler.FreeResponse:
        """Frees bookings. An unknown booking is no error."""

    def open_session(
        self, request: scheduler.OpenSessionRequest, *, deadline: Deadline
    ) -> Immediate[scheduler.OpenSessionResponse]:
        """Opens a session, which owns the bookings made in it until it ends and its grace period is over."""

    def update_bookings(
        self, request: scheduler.UpdateBookingsRequest, *, deadline: Deadline
    ) -> Immediate[scheduler.UpdateBookingsResponse]:
        """Applies numbered updates of a session's bookings."""

    def close_session(
        self, request: scheduler.CloseSessionRequest, *, deadline: Deadline
    ) -> Immediate[scheduler.CloseSessionResponse]:
        """Closes a session."""

    async def get_potential_loads(
        self, request: scheduler.GetPotentialLoadsRequest, *, deadline: Deadline
    ) -> scheduler.GetPotentialLoadsResponse:
        """Returns the load each rank would have with a request."""

    async def drain_worker(
        self, request: scheduler.DrainWorkerRequest, *, deadline: Deadline
    ) -> scheduler.DrainWorkerResponse:
        """Stops new requests to a worker."""

    async def undrain_worker(
        self, request: scheduler.UndrainWorkerRequest, *, deadline: Deadline
    ) -> scheduler.UndrainWorkerResponse:
        """Ends the drain of a worker."""

    async def set_busy_threshold(
        self, request: scheduler.SetBusyThresholdRequest, *, deadline: Deadline
    ) -> scheduler.SetBusyThresholdResponse:
        """Sets or reads the thresholds above which a rank is busy."""

    async def list_busy_thresholds(
        self, request: scheduler.ListBusyThresholdsRequest, *, deadline: Deadline
    ) -> scheduler.ListBusyThresholdsResponse:
        """Lists the thresholds of all models."""

    async def explain(self, request: scheduler.ExplainRequest, *, deadline: Deadline) -> scheduler.ExplainResponse:
        """Returns the terms of every candidate of a past decision."""

    async def get_status(
        self, request: scheduler.GetStatusRequest, *, deadline: Deadline
    ) -> scheduler.GetStatusResponse:
        """Returns the Scheduler's view of its ranks, its bookings, and its latest decisions."""


class Frontend(Protocol):
    """The gateway for clients. Fields: kvrouter/v1/frontend.proto."""

    def generate(
        self, request: frontend.FrontendServiceGenerateRequest, *, deadline: Deadline
    ) -> Stream[frontend.FrontendServiceGenerateResponse]:
        """Routes a request, runs it, and yields its output."""

    async def select_worker(
        self, request: frontend.FrontendServiceSelectWorkerRequest, *, deadline: Deadline
    ) -> frontend.FrontendServiceSelectWorkerResponse:
        """Returns the worker a request would go to. If it is booked, the caller must free it."""

    async def get_potential_loads(
        self, request: frontend.FrontendServiceGetPotentialLoadsRequest, *, deadline: Deadline
    ) -> frontend.FrontendServiceGetPotentialLoadsResponse:
        """Returns the load each rank would have with a request."""

    async def mark_prefill_complete(
        self, request: frontend.FrontendServiceMarkPrefillCompleteRequest, *, deadline: Deadline
    ) -> frontend.FrontendServiceMarkPrefillCompleteResponse:
        """Marks the prefill of a booking made by SelectWorker as complete."""

    async def free(
        self, request: frontend.FrontendServiceFreeRequest, *, deadline: Deadline
    ) -> frontend.FrontendServiceFreeResponse:
        """Frees a booking made by SelectWorker."""

    async def list_models(
        self, request: frontend.ListModelsRequest, *, deadline: Deadline
    ) -> frontend.ListModelsResponse:
        """Lists the served models."""

    async def get_worker_health(
        self, request: frontend.GetWorkerHealthRequest, *, deadline: Deadline
    ) -> frontend.GetWorkerHealthResponse:
        """Returns each worker's health as this Frontend observes it."""

    def keep_session(
        self, request: frontend.KeepSessionRequest, *, deadline: Deadline
    ) -> Stream[frontend.KeepSessionResponse]:
        """Keeps a client's session open until the call ends."""

    async def find_matches(
        self, request: frontend.FrontendServiceFindMatchesRequest, *, deadline: Deadline
    ) -> frontend.FrontendServiceFindMatchesResponse:
        """Returns the overlap of each rank with a prompt, as an Indexer reports it."""

    def dump(
        self, request: frontend.FrontendServiceDumpRequest, *, deadline: Deadline
    ) -> Stream[frontend.FrontendServiceDumpResponse]:
        """Yields an Indexer's whole index of a component in chunks, rank by rank."""


class Worker(Protocol):
    """An engine behind the publisher SDK. Fields: kvrouter/v1/worker.proto."""

    def generate(
        self, request: worker.WorkerServiceGenerateRequest, *, deadline: Deadline
    ) -> Stream[worker.WorkerServiceGenerateResponse]:
        """Runs a request and yields its output. Cancelling the call aborts the request."""

    async def abort(self, request: worker.AbortRequest, *, deadline: Deadline) -> worker.AbortResponse:
        """Aborts requests by id. Unknown ids are ignored."""

    def get_rank_state(
        self, request: worker.GetRankStateRequest, *, deadline: Deadline
    ) -> Stream[worker.GetRankStateResponse]:
        """Yields the state of one rank in chunks, which together replace the rank's state in an index."""

    def get_events(self, request: worker.GetEventsRequest, *, deadline: Deadline) -> Stream[worker.GetEventsResponse]:
        """Yields the events of one rank from a given id, as far as the worker still has them."""

    async def get_load(self, request: worker.GetLoadRequest, *, deadline: Deadline) -> worker.GetLoadResponse:
        """Returns the load of every rank."""

    def get_model_file(
        self, request: worker.GetModelFileRequest, *, deadline: Deadline
    ) -> Stream[worker.GetModelFileResponse]:
        """Yields the content of a file of the model in pieces."""


class Replica(Protocol):
    """A Scheduler, for the others of its system. Fields: kvrouter/v1/sync.proto."""

    def follow(self, request: sync.FollowRequest, *, deadline: Deadline) -> Stream[sync.FollowResponse]:
        """Yields the events of the Scheduler from now on."""

    def get_bookings(self, request: sync.GetBookingsRequest, *, deadline: Deadline) -> Stream[sync.GetBookingsResponse]:
        """Yields the bookings of the Scheduler in one component."""
