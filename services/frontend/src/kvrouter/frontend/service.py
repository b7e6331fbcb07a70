"""Implements the Frontend's contract with sessions at Schedulers and channels to workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from kvrouter.frontend.access import rules
from kvrouter.frontend.access.caller import current_grant
from kvrouter.frontend.access.client_bookings import ClientBookings
from kvrouter.frontend.access.rules import own_booking, owned_id, visible
from kvrouter.frontend.edge.grpc_output import OutputBuffer, overlaps_of, selection_of, with_text
from kvrouter.frontend.generate_request import GenerateRequest
from kvrouter.frontend.packed_prompt import take_prompt
from kvrouter.frontend.proxy.prompt_comparison import PromptComparison
from kvrouter.frontend.request.model_choice import ModelChoices
from kvrouter.frontend.request.model_pools import describe_models, of_pool, pools_of_model
from kvrouter.frontend.request.progress import OutputReceiver
from kvrouter.frontend.request.request_checks import check_routing, requested_tokens
from kvrouter.frontend.request.request_runner import RequestRunner
from kvrouter.frontend.schedulers.client_sessions import kept_session, open_session, scheduler_session_id
from kvrouter.frontend.schedulers.indexer_client import IndexerClient
from kvrouter.frontend.schedulers.scheduler_link import ANSWER_SECONDS
from kvrouter.runtime.contracts import Scheduler
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import ComponentView, Directory
from kvrouter.runtime.requests import component_name
from kvrouter.runtime.rpc import not_awaited_by_drain
from kvrouter.v1 import frontend_pb2 as pb
from kvrouter.v1.common_pb2 import BookingKey, BusyThresholds, Component, RoutingRequest, Stage
from kvrouter.v1.errors import DeadlineExceeded, DependencyAway, KvRouterError, SessionLost
from kvrouter.v1.indexer_pb2 import DumpRequest, FindMatchesRequest
from kvrouter.v1.names import ComponentName
from kvrouter.v1.pages import page_of
from kvrouter.v1.scheduler_pb2 import (
    FreeRequest,
    FreeResponse,
    GetPotentialLoadsRequest,
    ListBusyThresholdsRequest,
    MarkPrefillCompleteRequest,
    MarkPrefillCompleteResponse,
    SelectWorkerRequest,
    SetBusyThresholdRequest,
)

_Answer = TypeVar("_Answer", FreeResponse, MarkPrefillCompleteResponse)


class FrontendService:
    """The service behind the Frontend's gRPC and HTTP APIs."""

    def __init__(
        self,
        directory: Directory,
        runner: RequestRunner,
        indexers: IndexerClient,
        bookings: ClientBookings,
        prompts: PromptComparison,
        choices: ModelChoices,
    ) -> None:
        """Serves what the runner serves.

        Args:
            directory: The registered components.
            runner: Runs requests.
            indexers: Indexers to query.
            bookings: Bookings and sessions of clients.
            prompts: Comparison of the prompts' tokens with those of engines.
            choices: The models for the names that clients send.
        """
        self.runner = runner
        self.models = runner.models
        self.choices = choices
        self.access = runner.access
        self.indexers = indexers
        self._bookings = bookings
        self._prompts = prompts
        self._directory = directory
        self._links = links = runner.links
        self._pool_choice = runner.pool_choice
        runner.metrics.live_bookings.set_function(lambda: links.live_bookings)
        runner.metrics.sharded_components.set_function(lambda: links.sharded_components)

    def ready(self) -> bool:
        """Returns whether requests can be routed."""
        return self._directory.is_synced and self._links.ready()

    @property
    def registrations_age_seconds(self) -> float | None:
        """Seconds since etcd last confirmed the registrations; None without etcd."""
        return self._directory.age_seconds

    async def generate(
        self, request: pb.FrontendServiceGenerateRequest, *, deadline: Deadline
    ) -> AsyncGenerator[pb.FrontendServiceGenerateResponse, None]:
        """Routes a request, runs it, and yields its output piece by piece.

        Raises:
            BadRequest, PromptTooLong, UnknownModel, UnknownComponent, UnknownWorker, NoWorkers, NotReady, AllBusy,
            WorkerLost, PoisonPrompt, OutOfRange, TooLarge, Overloaded, DeadlineExceeded, DependencyAway.
        """
        async with aclosing(self.generate_encoded(request, deadline=deadline)) as responses:
            async for encoded in responses:
                yield pb.FrontendServiceGenerateResponse.FromString(encoded)

    async def generate_encoded(
        self, request: pb.FrontendServiceGenerateRequest, *, deadline: Deadline
    ) -> AsyncGenerator[bytes, None]:
        """Does the same as ``generate`` and yields encoded responses, without encoding the worker's output again."""
        buffer = OutputBuffer()
        request.conversation_id = self.runner.conversations.of({}, conversation_id=request.conversation_id)
        running = asyncio.create_task(self._generate(request, buffer, deadline))
        running.add_done_callback(lambda _: buffer.end())
        try:
            while responses := await buffer.take():
                for response in responses:
                    yield response
            await running
        finally:
            running.cancel()
            await asyncio.wait([running])
            del running  # Its exception's traceback refers to this frame.

    async def _generate(
        self, request: pb.FrontendServiceGenerateRequest, buffer: OutputBuffer, deadline: Deadline
    ) -> None:
        """Runs a request at the first model for its name that can serve it."""
        prompt = take_prompt(request)
        choices = self.choices.of(request.model, request.conversation_id)
        if not choices:
            await self._generate_at_model(request, prompt, buffer, deadline)
            return

        async def attempt(model: str) -> None:
            renamed = pb.FrontendServiceGenerateRequest()
            renamed.CopyFrom(request)
            renamed.model = model
            await self._generate_at_model(renamed, prompt, buffer, deadline)

        await self.choices.serve(choices, attempt, begun=lambda: buffer.begun)

    async def _generate_at_model(
        self, request: pb.FrontendServiceGenerateRequest, prompt: bytes, buffer: OutputBuffer, deadline: Deadline
    ) -> None:
        receiver: OutputReceiver = buffer
        if request.prompt_text or request.return_text:
            prompt, receiver = await with_text(self.models, self.runner.limits, request, prompt, buffer)
        await self.runner.run(GenerateRequest.of(request), prompt, receiver, deadline=deadline)

    async def select_worker(
        self, request: pb.FrontendServiceSelectWorkerRequest, *, deadline: Deadline
    ) -> pb.FrontendServiceSelectWorkerResponse:
        """Returns the rank a request would go to. A named booking is made, in the session or under a lease.

        Raises:
            BadRequest, PromptTooLong, BlockSizeMismatch, UnknownModel, UnknownComponent, UnknownWorker, NoWorkers,
            AllBusy, RequestIdReused, TooLarge, DeadlineExceeded, DependencyAway.
        """
        booking = request.booking if "booking" in request else None
        select = SelectWorkerRequest(request=request.request, booking=booking, restores=request.restores)
        if request.session_id:
            select.session_id = scheduler_session_id(self._own_session(request.session_id))
        component = await self._resolve_pool(select.request, request.booking.stage, deadline)
        avoided = select.request.constraints.avoided_workers
        by_client = list(avoided)
        del avoided[:]
        avoided.extend((*self.runner.workers.health.avoided(component), *by_client))
        scheduler = self._links.scheduler(component)
        if booking is None:
            return await self._select(scheduler, select, request.session_id, deadline)
        self._own_booking(select.booking)
        select.lease_ms = self._bookings.lease_ms(request.lease_ms if "lease_ms" in request else None)
        tokens, output_tokens = requested_tokens(select.request), select.request.max_output_tokens
        session_id = self._own_session(request.session_id)
        with self._bookings.booking(select.booking, session_id, select.lease_ms, tokens, output_tokens):
            return await self._select(scheduler, select, request.session_id, deadline)

    async def _select(
        self, scheduler: Scheduler, select: SelectWorkerRequest, session_id: str, deadline: Deadline
    ) -> pb.FrontendServiceSelectWorkerResponse:
        try:
            selection = await scheduler.select_worker(select, deadline=deadline)
            return pb.FrontendServiceSelectWorkerResponse(selection=selection_of(selection))
        except SessionLost:
            # KeepSession has not reached this Scheduler yet. If no such call runs, the session ends by itself.
            await open_session(scheduler, self._own_session(session_id))
            selection = await scheduler.select_worker(select, deadline=deadline)
            return pb.FrontendServiceSelectWorkerResponse(selection=selection_of(selection), session_opened=True)

    async def get_potential_loads(
        self, request: pb.FrontendServiceGetPotentialLoadsRequest, *, deadline: Deadline
    ) -> pb.FrontendServiceGetPotentialLoadsResponse:
        """Returns the load each rank would have with a request.

        Raises:
            BadRequest, PromptTooLong, BlockSizeMismatch, UnknownModel, UnknownComponent, UnknownWorker,
            DeadlineExceeded, DependencyAway.
        """
        asked = GetPotentialLoadsRequest(request=request.request)
        scheduler = self._links.scheduler(self._resolve(asked.request, Stage.STAGE_WHOLE)[0])
        answer = await scheduler.get_potential_loads(asked, deadline=deadline)
        return pb.FrontendServiceGetPotentialLoadsResponse(loads=answer.loads)

    async def mark_prefill_complete(
        self, request: pb.FrontendServiceMarkPrefillCompleteRequest, *, deadline: Deadline
    ) -> pb.FrontendServiceMarkPrefillCompleteResponse:
        """Marks the prompt of a booking made by ``select_worker`` as computed.

        Raises:
            BadRequest, DeadlineExceeded, DependencyAway.
        """
        marking = MarkPrefillCompleteRequest(booking=self._own_booking(request.booking))
        known = await self._ask_all(
            lambda scheduler, limit: scheduler.mark_prefill_complete(marking, deadline=limit), deadline
        )
        self._bookings.renew(marking.booking)
        return pb.FrontendServiceMarkPrefillCompleteResponse(known=known)

    async def free(
        self, request: pb.FrontendServiceFreeRequest, *, deadline: Deadline
    ) -> pb.FrontendServiceFreeResponse:
        """Ends a booking made by ``select_worker``.

        Raises:
            BadRequest, DeadlineExceeded, DependencyAway.
        """
        freeing = FreeRequest(booking=self._own_booking(request.booking))
        known = await self._ask_all(lambda scheduler, limit: scheduler.free(freeing, deadline=limit), deadline)
        self._bookings.release(freeing.booking)
        return pb.FrontendServiceFreeResponse(known=known)

    def served_models(self) -> list[pb.Model]:
        """Returns the served models that the caller may use, in order of name."""
        models = describe_models(self._directory.components)
        return models if self.access is None else visible(self.access.caller(), models)

    async def list_models(self, request: pb.ListModelsRequest, *, deadline: Deadline) -> pb.ListModelsResponse:  # noqa: ARG002
        """Returns a page of the served models."""
        page, token = page_of(self.served_models(), request, _model_key)
        return pb.ListModelsResponse(models=page, next_page_token=token)

    async def get_worker_health(
        self,
        request: pb.GetWorkerHealthRequest,
        *,
        deadline: Deadline,  # noqa: ARG002 - answered from memory
    ) -> pb.GetWorkerHealthResponse:
        """Returns a page of the workers' health, as this Frontend sees it.

        Raises:
            BadRequest.
        """
        component = component_name(request.component) if "component" in request else None
        workers = self.runner.workers.health.status(component, self._prompts.difference)
        page, token = page_of(workers, request, _worker_key)
        return pb.GetWorkerHealthResponse(workers=page, next_page_token=token)

    @not_awaited_by_drain
    async def keep_session(
        self,
        request: pb.KeepSessionRequest,
        *,
        deadline: Deadline,  # noqa: ARG002 - it lasts as long as the call
    ) -> AsyncGenerator[pb.KeepSessionResponse, None]:
        """Keeps a client's session open until the call ends. Yields one response, when it is open.

        Raises:
            BadRequest, DependencyAway.
        """
        if (grant := current_grant()) is not None:
            grant.end()  # It counts as a call, and then as a session.
        session_id = self._own_session(request.session_id)
        owned = pb.KeepSessionRequest(session_id=session_id, client_name=request.client_name)
        with self._bookings.session(session_id) as kept:
            async with aclosing(kept_session(owned, self._links.schedulers)) as opened:
                async for response in opened:
                    kept.grace_seconds = response.grace_ms / 1000
                    yield pb.KeepSessionResponse(grace_ms=response.grace_ms)

    async def find_matches(
        self, request: pb.FrontendServiceFindMatchesRequest, *, deadline: Deadline
    ) -> pb.FrontendServiceFindMatchesResponse:
        """Returns the overlap of each rank with a prompt, as an Indexer reports it.

        Raises:
            BadRequest, PromptTooLong, BlockSizeMismatch, UnknownModel, UnknownComponent, NotReady, DeadlineExceeded,
            DependencyAway.
        """
        asked = RoutingRequest()
        asked.CopyFrom(request.request)
        indexer = await self.indexers.indexer(self._resolve(asked, Stage.STAGE_WHOLE)[0])
        query = FindMatchesRequest(
            component=asked.component,
            block_size=asked.block_size if "block_size" in asked else None,
            scope=asked.scope,
            multimodal_hashes=asked.multimodal_hashes,
        )
        if "local_hashes" in asked:
            query.local_hashes.CopyFrom(asked.local_hashes)
        else:
            query.token_ids.CopyFrom(asked.token_ids)
        return overlaps_of(await indexer.find_matches(query, deadline=deadline))

    async def dump(
        self, request: pb.FrontendServiceDumpRequest, *, deadline: Deadline
    ) -> AsyncGenerator[pb.FrontendServiceDumpResponse, None]:
        """Yields an Indexer's whole index of a component in chunks, rank by rank.

        Raises:
            BadRequest, UnknownModel, UnknownComponent, NotReady, DeadlineExceeded, DependencyAway.
        """
        named = "component" in request
        component = component_name(request.component) if named else self._view(request.model).name
        indexer = await self.indexers.indexer(component)
        dump = DumpRequest(component=Component(namespace=component.namespace, name=component.name))
        async with aclosing(indexer.dump(dump, deadline=deadline)) as parts:
            async for part in parts:
                yield pb.FrontendServiceDumpResponse(state=part.state)

    async def set_busy_threshold(self, request: SetBusyThresholdRequest, *, deadline: Deadline) -> BusyThresholds:
        """Sets the given busy thresholds of a model. Returns those in force.

        Raises:
            KvRouterError: the model is unknown, or the thresholds cannot be stored.
        """
        scheduler = self._links.scheduler(self._view(request.model).name)
        return (await scheduler.set_busy_threshold(request, deadline=deadline)).thresholds

    async def busy_thresholds(self, *, deadline: Deadline) -> dict[str, BusyThresholds]:
        """Returns the busy thresholds in force, for every model with one.

        Raises:
            KvRouterError: a Scheduler does not answer.
        """
        thresholds: dict[str, BusyThresholds] = {}
        for scheduler in self._links.deciding_schedulers():
            answer = await scheduler.list_busy_thresholds(ListBusyThresholdsRequest(), deadline=deadline)
            thresholds.update(answer.thresholds)
        return thresholds

    async def _ask_all(self, ask: Callable[[Scheduler, Deadline], Awaitable[_Answer]], deadline: Deadline) -> bool:
        """Calls every live Scheduler about a booking, since a stand-in may have made it while the usual one was away.

        Returns whether one knows it. One that fails or times out matters only if no other Scheduler knows the booking.

        Raises:
            DependencyAway: no Scheduler is live.
            KvRouterError: no Scheduler knows the booking, and one that might know it failed.
        """
        schedulers = self._links.schedulers()
        if not schedulers and self._directory.components:
            raise DependencyAway("no Scheduler is registered and ready: check that one runs in this namespace")
        limit = deadline.within(ANSWER_SECONDS)
        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(_settled(ask(each, limit))) for each in schedulers]
        outcomes = [task.result() for task in asking]
        known = any(not isinstance(outcome, KvRouterError) and outcome.known for outcome in outcomes)
        failure = next((outcome for outcome in outcomes if isinstance(outcome, KvRouterError)), None)
        if failure is None or known:
            return known
        if isinstance(failure, DeadlineExceeded) and not deadline.expired:
            raise DependencyAway("a Scheduler that may have the booking does not answer")
        raise failure.untraced()

    def _own_booking(self, booking: BookingKey) -> BookingKey:
        """Makes a client's booking one of its tenant, and returns it."""
        if self.access is not None:
            own_booking(self.access.caller(), booking)
        return booking

    def _own_session(self, session_id: str) -> str:
        """Returns the id of a client's session, which is one of its tenant."""
        return session_id if self.access is None else owned_id(self.access.caller(), session_id)

    def _check_access(self, request: RoutingRequest, model: str) -> None:
        access = self.access
        if access is not None:
            isolates = access.isolates_tenants
            access.enforce(
                lambda caller: rules.check_routing(caller, request, model, access.salts, isolates_tenants=isolates),
                "SchedulerCall",
            )

    def _view(self, model: str) -> ComponentView:
        return pools_of_model(model, self._directory.components)[0]

    async def _resolve_pool(self, request: RoutingRequest, stage: Stage, deadline: Deadline) -> ComponentName:
        """Does the same as ``_resolve``, but of several components of the model takes the one where it costs least."""
        name, views = self._resolve(request, stage)
        if len(views) <= 1:
            return name

        def routing(view: ComponentView) -> RoutingRequest:
            routed = RoutingRequest()
            routed.CopyFrom(request)
            routed.component.CopyFrom(view.descriptor.component)
            return routed

        view = (await self._pool_choice.cheapest_first(views, routing, deadline))[0]
        request.component.CopyFrom(view.descriptor.component)
        return view.name

    def _resolve(self, request: RoutingRequest, stage: Stage) -> tuple[ComponentName, list[ComponentView]]:
        """Checks a request, and sets its component where it names only a model. No Scheduler then looks it up again.

        Returns:
            The component, and all that can serve the request; none if it names one itself.
        """
        check_routing(request, self.runner.limits)
        if "component" in request:
            name = component_name(request.component)
            view = self._directory.components.get(name)
            self._check_access(request, "" if view is None else view.model)
            return name, []
        request.ClearField("model_choice")
        pool = ""
        if (choice := self.choices.first(request.model, request.conversation_id)) is not None:
            request.model, request.model_choice, pool = choice.model, choice.text, choice.pool
        self._check_access(request, request.model)
        views = of_pool(pools_of_model(request.model, self._directory.components, stage), pool)
        request.component.CopyFrom(views[0].descriptor.component)
        return views[0].name, views


async def _settled(requested: Awaitable[_Answer]) -> _Answer | KvRouterError:
    try:
        return await requested
    except KvRouterError as error:
        return error


def _model_key(model: pb.Model) -> str:
    return f"{model.name} {model.component.namespace}/{model.component.name}"


def _worker_key(worker: pb.WorkerHealth) -> str:
    return f"{worker.component.namespace}/{worker.component.name} {worker.worker_id:020}"
