"""Implements the Scheduler's contract with the Scheduler's parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from kvrouter.runtime.booking_updates import Free, OutputReport, PrefillComplete, UpdateAnswer, UpdateCall
from kvrouter.runtime.contracts import Connection
from kvrouter.runtime.deadline import Deadline
from kvrouter.scheduler.api.drains import Drains
from kvrouter.scheduler.api.selection import Selector
from kvrouter.scheduler.api.sessions import Sessions
from kvrouter.scheduler.api.status import Status
from kvrouter.scheduler.bookings.updates import BookingUpdates
from kvrouter.scheduler.load.pools import Pools
from kvrouter.scheduler.load.thresholds import ThresholdBoard
from kvrouter.scheduler.request.options import ThresholdUpdate
from kvrouter.scheduler.routing.decide import Decisions
from kvrouter.v1 import scheduler_pb2 as pb
from kvrouter.v1.errors import BadRequest, NotFound, UnknownModel


@dataclass(eq=False)
class SchedulerService:
    """The object behind the Scheduler's gRPC API; see ``kvrouter.runtime.contracts.Scheduler``.

    ``is_ready`` returns whether registrations and thresholds have been read.
    """

    pools: Pools
    selector: Selector
    bookings: BookingUpdates
    sessions: Sessions
    decisions: Decisions
    thresholds: ThresholdBoard
    status: Status
    drains: Drains
    _: KW_ONLY
    is_ready: Callable[[], bool]

    @property
    def ready(self) -> bool:
        """Returns whether requests can be routed."""
        return self.is_ready()

    async def select_worker(self, request: pb.SelectWorkerRequest, *, deadline: Deadline) -> pb.SelectWorkerResponse:
        """Chooses a rank and books the request there, for the named session or under a lease.

        Raises:
            BadRequest, PromptTooLong, BlockSizeMismatch, UnknownModel, UnknownComponent, UnknownWorker, NoWorkers,
            AllBusy, RequestIdReused, SessionLost, TooLarge, DeadlineExceeded.
        """
        if request.compares:
            return await self.selector.compare(request, deadline=deadline)
        return await self.selector.select(request, deadline=deadline)

    async def mark_prefill_complete(
        self, request: pb.MarkPrefillCompleteRequest, *, deadline: Deadline
    ) -> pb.MarkPrefillCompleteResponse:
        """Marks the prompt of a booking as computed.

        Raises:
            BadRequest.
        """
        return pb.MarkPrefillCompleteResponse(known=self.bookings.mark_prefill_complete(PrefillComplete.of(request)))

    async def report_output(self, request: pb.ReportOutputRequest, *, deadline: Deadline) -> pb.ReportOutputResponse:
        """Records how many tokens a booking has generated.

        Raises:
            BadRequest.
        """
        return pb.ReportOutputResponse(known=self.bookings.report_output(OutputReport.of(request)))

    async def free(self, request: pb.FreeRequest, *, deadline: Deadline) -> pb.FreeResponse:
        """Ends a booking.

        Raises:
            BadRequest.
        """
        return pb.FreeResponse(known=self.bookings.free(Free.of(request)))

    def open_session(
        self, request: pb.OpenSessionRequest, *, deadline: Deadline, connection: Connection | None = None
    ) -> pb.OpenSessionResponse:
        """Opens a session. It is closed at once when the ``connection`` is lost.

        Raises:
            BadRequest, SessionLost.
        """
        return self.sessions.open(request, connection)

    def update_bookings(self, request: pb.UpdateBookingsRequest, *, deadline: Deadline) -> pb.UpdateBookingsResponse:
        """Applies numbered updates of a session's bookings.

        Raises:
            BadRequest, SessionLost.
        """
        return self.sessions.update(UpdateCall.of(request)).to_message()

    def apply_updates(self, call: UpdateCall) -> UpdateAnswer:
        """Applies updates as ``update_bookings``, for a caller in this process.

        Raises:
            BadRequest, SessionLost.
        """
        return self.sessions.update(call)

    def close_session(self, request: pb.CloseSessionRequest, *, deadline: Deadline) -> pb.CloseSessionResponse:
        """Closes a session. Its bookings are dropped after the grace, unless it is opened again."""
        return self.sessions.close(request)

    async def get_potential_loads(
        self, request: pb.GetPotentialLoadsRequest, *, deadline: Deadline
    ) -> pb.GetPotentialLoadsResponse:
        """Returns the load of each rank with a request added. Reads overlaps unless the weight is 0.

        Raises:
            BadRequest, PromptTooLong, BlockSizeMismatch, UnknownModel, UnknownComponent, UnknownWorker.
        """
        return await self.selector.potential_loads(request, deadline=deadline)

    async def drain_worker(self, request: pb.DrainWorkerRequest, *, deadline: Deadline) -> pb.DrainWorkerResponse:
        """Stops new requests to a worker at every Scheduler and Frontend.

        Raises:
            BadRequest, UnknownComponent, UnknownWorker, DependencyAway.
        """
        return await self.drains.drain(request)

    async def undrain_worker(self, request: pb.UndrainWorkerRequest, *, deadline: Deadline) -> pb.UndrainWorkerResponse:
        """Ends the drain of a worker.

        Raises:
            BadRequest, UnknownComponent, UnknownWorker, DependencyAway.
        """
        return await self.drains.undrain(request)

    async def set_busy_threshold(
        self, request: pb.SetBusyThresholdRequest, *, deadline: Deadline
    ) -> pb.SetBusyThresholdResponse:
        """Sets or clears thresholds of a model. Returns those in force.

        Raises:
            BadRequest, UnknownModel, DependencyAway.
        """
        if request.model not in self.pools.models():
            raise UnknownModel(request.model, self.pools.models())
        update = ThresholdUpdate.of(request)
        in_force = self.thresholds.of(request.model)
        if update:
            in_force = await self.thresholds.update(request.model, update)
        return pb.SetBusyThresholdResponse(thresholds=in_force.to_message())

    async def list_busy_thresholds(
        self, request: pb.ListBusyThresholdsRequest, *, deadline: Deadline
    ) -> pb.ListBusyThresholdsResponse:
        """Returns the thresholds of every model with one in force."""
        in_force = self.thresholds.in_force(self.pools.models())
        return pb.ListBusyThresholdsResponse(
            thresholds={model: thresholds.to_message() for model, thresholds in in_force.items()}
        )

    async def explain(self, request: pb.ExplainRequest, *, deadline: Deadline) -> pb.ExplainResponse:
        """Returns the terms of every candidate in a past decision.

        Raises:
            BadRequest, NotFound.
        """
        match request.WhichOneof("which"):
            case "decision_id":
                decided, name = self.decisions.by_id(request.decision_id), str(request.decision_id)
            case "request_id":
                decided = self.decisions.by_request(request.request_id)
                name = f"for request {request.request_id[:128]!r}"
            case _:
                raise BadRequest("no decision is named", field="which", advice="Send its id, or a request's id.")
        if decided is None:
            raise NotFound(
                f"decision {name} not found: this Scheduler keeps its last {self.decisions.capacity:,} decisions",
                field="which",
                advice="Ask the Scheduler that made it, or raise --decisions-kept.",
            )
        return pb.ExplainResponse(decision=decided.to_message())

    async def get_status(self, request: pb.GetStatusRequest, *, deadline: Deadline) -> pb.GetStatusResponse:
        """Returns the load of every rank as accounted here, the queue, and the last decisions.

        Raises:
            UnknownComponent.
        """
        return self.status.answer(request, ready=self.ready)
