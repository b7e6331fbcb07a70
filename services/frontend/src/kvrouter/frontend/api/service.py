"""Implements the Frontend's contract with sessions at Schedulers and channels to workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TypeVar

from kvrouter.frontend.access import rules
from kvrouter.frontend.access.access import Access
from kvrouter.frontend.access.quotas import Grant
from kvrouter.frontend.access.rules import check_generation, check_model, own_booking, owned_id, visible
from kvrouter.frontend.admission.admission import Admission, Admitted
from kvrouter.frontend.api.output_buffer import OutputBuffer
from kvrouter.frontend.api.text_output import TextOutput
from kvrouter.frontend.api.validation import (
    Limits,
    check_request,
    check_routing,
    describe_models,
    fitting_pools,
    pools_of_model,
    resolve_model,
)
from kvrouter.frontend.client_sessions import kept_session, open_session, scheduler_session_id
from kvrouter.frontend.disaggregation.prefill_stage import Disaggregation, PrefillStage
from kvrouter.frontend.indexer_client import IndexerClient
from kvrouter.frontend.lifecycle.attempt_budget import AttemptBudget
from kvrouter.frontend.lifecycle.continuation import why_not
from kvrouter.frontend.lifecycle.generation import Generation
from kvrouter.frontend.lifecycle.output_receiver import OutputComplete, OutputReceiver
from kvrouter.frontend.lifecycle.request_pools import RequestPools
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.packed_prompt import TOKEN_BYTES, take_prompt
from kvrouter.frontend.recording.recorder import Recorder
from kvrouter.frontend.scheduler_client.link_pool import SchedulerLinks
from kvrouter.frontend.scheduler_client.pool_choice import PoolChoice
from kvrouter.frontend.scheduler_client.session_link import HEARTBEAT_TIMEOUT_SECONDS
from kvrouter.frontend.text.text_models import TextModels
from kvrouter.frontend.web.popular_prefixes import PopularPrefixes
from kvrouter.frontend.worker_client.client import WorkerClient, Workers
from kvrouter.runtime.component_field import component_name
from kvrouter.runtime.contracts import Scheduler
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import ComponentView, Directory
from kvrouter.runtime.errors import (
    BadRequest,
    DeadlineExceeded,
    DependencyAway,
    KvRouterError,
    SessionLost,
    UnknownModel,
)
from kvrouter.runtime.rpc import not_awaited_by_drain
from kvrouter.v1.common_pb2 import Component, Stage
from kvrouter.v1.frontend_pb2 import (
    BestWorkerRequest,
    BestWorkerResponse,
    DumpIndexRequest,
    DumpIndexResponse,
    FindOverlapsRequest,
    FindOverlapsResponse,
    FrontendServiceGenerateRequest,
    FrontendServiceGenerateResponse,
    GetWorkerHealthRequest,
    GetWorkerHealthResponse,
    KeepSessionRequest,
    KeepSessionResponse,
    ListModelsRequest,
    ListModelsResponse,
    PotentialLoadsRequest,
    PotentialLoadsResponse,
    PrefillCompleteRequest,
    PrefillCompleteResponse,
    ReleaseRequest,
    ReleaseResponse,
)
from kvrouter.v1.indexer_pb2 import DumpRequest, FindMatchesRequest
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import WorkerRegistration
from kvrouter.v1.scheduler_pb2 import (
    BusyThresholds,
    FreeRequest,
    FreeResponse,
    GetPotentialLoadsRequest,
    ListBusyThresholdsRequest,
    MarkPrefillCompleteRequest,
    MarkPrefillCompleteResponse,
    RoutingRequest,
    SelectWorkerRequest,
    SetBusyThresholdRequest,
)

_Answer = TypeVar("_Answer", FreeResponse, MarkPrefillCompleteResponse)


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """Operator settings of request handling."""

    limits: Limits
    max_attempts: int
    """Maximum number of attempts for a request."""
    default_deadline_seconds: float
    """Deadline of requests whose client sets none."""
    migration_limit: int
    """Maximum number of migrations of requests that set none."""


class FrontendService:
    """The service behind the Frontend's gRPC and HTTP APIs."""

    def __init__(
        self,
        directory: Directory,
        links: SchedulerLinks,
        workers: WorkerClient,
        metrics: FrontendMetrics,
        options: GatewayOptions,
        recorder: Recorder | None = None,
        texts: TextModels | None = None,
        indexers: IndexerClient | None = None,
        access: Access | None = None,
        disaggregation: Disaggregation | None = None,
        popular_prefixes: PopularPrefixes | None = None,
        admission: Admission | None = None,
    ) -> None:
        self.options = options
        self.access = access
        """Authentication; None if everybody may do everything."""
        self.texts = texts
        """Tokenizers and chat templates; None if prompts are token ids only."""
        self._directory = directory
        self._forwarding_of: object = None
        self._forwarding: set[ComponentName] = set()
        self._links = links
        self._pool_choice = PoolChoice(links)
        self._workers = workers
        self._metrics = metrics
        self._recorder = recorder
        self.popular_prefixes = popular_prefixes
        """Counts the prefixes of prompts; None to count none."""
        self.indexers = indexers or IndexerClient(directory)
        """The Indexers, for questions about the index."""
        self._disaggregation = disaggregation
        self._admission = admission
        self._in_flight = 0
        metrics.in_flight.set_function(lambda: self._in_flight)
        metrics.live_bookings.set_function(lambda: links.live_bookings)
        metrics.sharded_components.set_function(lambda: links.sharded_components)

    def ready(self) -> bool:
        """Returns whether requests can be routed."""
        return self._directory.is_synced and self._links.ready()

    @property
    def registrations_age_seconds(self) -> float | None:
        """Seconds since etcd last confirmed the registrations; None without etcd."""
        return self._directory.age_seconds

    async def generate(
        self, request: FrontendServiceGenerateRequest, *, deadline: Deadline
    ) -> AsyncGenerator[FrontendServiceGenerateResponse, None]:
        """Routes a request, runs it, and yields its output piece by piece.

        Raises:
            BadRequest, PromptTooLong, UnknownModel, UnknownComponent, UnknownWorker, NoWorkers, AllBusy, WorkerLost,
            OutOfRange, TooLarge, Overloaded, DeadlineExceeded, DependencyAway.
        """
        async with aclosing(self.generate_encoded(request, deadline=deadline)) as responses:
            async for encoded in responses:
                yield FrontendServiceGenerateResponse.FromString(encoded)

    async def generate_encoded(
        self, request: FrontendServiceGenerateRequest, *, deadline: Deadline
    ) -> AsyncGenerator[bytes, None]:
        """Does the same as ``generate`` and yields encoded responses, without encoding the worker's output again."""
        buffer = OutputBuffer()
        prompt = take_prompt(request)
        receiver: OutputReceiver = buffer
        if request.prompt_text or request.return_text:
            prompt, receiver = await self._with_text(request, prompt, buffer)
        running = asyncio.create_task(self.run(request, prompt, receiver, deadline=deadline))
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

    def check_text(self, model: str, field: str) -> None:
        """Checks that texts of a model can be tokenized.

        Args:
            model: Name of the model or adapter.
            field: Field of the request that has a text, for the error.

        Raises:
            UnknownModel: no component serves the model.
            BadRequest: the model has no tokenizer here.
        """
        view, _ = self.resolve(model)
        if self.texts is None:
            raise BadRequest(f"{field} needs a tokenizer", field=field, advice="Send token ids.")
        self.texts.get(view.descriptor.model, field)

    async def _with_text(
        self, request: FrontendServiceGenerateRequest, prompt: bytes, buffer: OutputBuffer
    ) -> tuple[bytes, OutputReceiver]:
        """Returns the prompt, tokenized if it is a text, and the receiver that adds text to the output if requested.

        Raises:
            UnknownModel: no component serves the model.
            BadRequest: the model has no tokenizer here, or there are token ids beside a text.
            PromptTooLong: the text has too many tokens.
        """
        field = "prompt_text" if request.prompt_text else "return_text"
        if request.prompt_text and prompt:
            raise BadRequest("prompt_text: there are token_ids too", field=field, advice="Send one of them.")
        view, _ = self.resolve(request.model)
        if self.texts is None:
            raise BadRequest(f"{field} needs a tokenizer", field=field, advice="Send token ids.")
        texts, text = self.texts, self.texts.get(view.descriptor.model, field)
        if request.prompt_text:
            longest = view.descriptor.max_model_len or self.options.limits.max_prompt_tokens + 1
            limit = min(self.options.limits.max_prompt_tokens, longest - 1)
            content = request.prompt_text
            prompt = await texts.timed(
                lambda: text.tokenizer.encode(content, special_tokens=True, limit=limit, field="prompt_text"),
                characters=len(content),
            )
            request.ClearField("prompt_text")
        if not request.return_text:
            return prompt, buffer
        stop = list(request.stop_conditions.stop)
        request.stop_conditions.ClearField("stop")
        if not all(stop):
            raise BadRequest("a stop string is empty", field="stop_conditions.stop", advice="Leave it out.")
        minimum = request.stop_conditions.min_tokens
        return prompt, TextOutput(buffer, text.detokenizer(prompt), stop, min_tokens=minimum)

    async def run(
        self,
        request: FrontendServiceGenerateRequest,
        prompt: bytes,
        receiver: OutputReceiver,
        *,
        deadline: Deadline,
        through: Workers | None = None,
    ) -> None:
        """Routes a request and runs it to its end; the receiver gets its output. Cancelling the task aborts it.

        Args:
            request: The request, without token ids.
            prompt: Its prompt, as a packed buffer.
            receiver: Receives the output.
            deadline: Deadline of the request.
            through: Starts the attempts, at workers that check the request themselves; None for their Generate.

        Raises:
            KvRouterError: the request is invalid, cannot be routed, or lost its worker; or an error of the receiver.
        """
        deadline = deadline.or_after(self.options.default_deadline_seconds)
        known_model, code = "", "CANCELLED"
        generation: Generation | None = None
        grant: Grant | None = None
        admitted: Admitted | None = None
        tokens = len(prompt) // TOKEN_BYTES
        self._in_flight += 1
        try:
            if self.access is not None:
                self.access.enforce(lambda caller: check_generation(caller, request), "Generate")
            views, lora_name = self._serving(request.model)
            known_model = views[0].descriptor.model
            if lora_name:
                request.model = known_model
                request.scope.lora_name = lora_name
            view, pools = views[0], None
            if len(views) > 1:
                pools = self._pools_of(request, tokens, lora_name or known_model, through)
                view = await pools.cheapest(prompt, deadline)
            if through is None:
                check_request(request, tokens, view, self.options.limits)
            if self.access is not None:
                grant = self.access.grant(tokens + request.stop_conditions.max_tokens, "Generate")
            admitted = self._admitted(request, view, tokens)
            generation = Generation(
                request,
                prompt,
                view,
                self._links,
                through or self._workers,
                self._metrics,
                self._budget(request, forwarded=through is not None),
                self._prefill_stage(request, view, through),
                pools,
            )
            with suppress(OutputComplete):
                await generation.run(receiver, deadline=deadline)
            generation.observe_success()
            code = "OK"
        except KvRouterError as error:
            code = error.code.name
            raise
        finally:
            self._in_flight -= 1
            output_tokens = 0 if generation is None else generation.output_tokens
            if grant is not None:
                grant.end(tokens + output_tokens if output_tokens else 0)
            if admitted is not None:
                admitted.end(output_tokens)
            self._metrics.requests.labels(self._metrics.models.label(known_model), code).inc()
            if generation is not None:
                self._note(generation)

    def _note(self, generation: Generation) -> None:
        """Gives an ended request to those that observe the traffic."""
        prefixes = self.popular_prefixes
        is_counted = prefixes is not None and prefixes.wants_next()
        if (self._recorder is None and not is_counted) or (outline := generation.outline()) is None:
            return
        if self._recorder is not None:
            self._recorder.note(outline)
        if prefixes is not None and is_counted:
            prefixes.note(outline)

    def _admitted(self, request: FrontendServiceGenerateRequest, view: ComponentView, tokens: int) -> Admitted | None:
        if self._admission is None:
            return None
        # A tenant that a client claims would give a share to whoever claims many.
        tenant, weight = "", 1.0
        if self.access is not None:
            caller = self.access.caller()
            tenant, weight = caller.tenant, caller.weight
        return self._admission.admit(view, tenant, weight, tokens, request.stop_conditions.max_tokens)

    def _budget(self, request: FrontendServiceGenerateRequest, *, forwarded: bool) -> AttemptBudget:
        limit = request.migration_limit if request.HasField("migration_limit") else self.options.migration_limit
        return AttemptBudget(
            max_attempts=self.options.max_attempts,
            migration_limit=limit,
            pinned=request.constraints.HasField("worker_id"),
            cannot_migrate="it was forwarded as it is" if forwarded else why_not(request.sampling_options),
        )

    def worker_at(self, endpoint: str) -> WorkerRegistration | None:
        """Returns the registered worker with an address; None if there is none."""
        views = self._directory.components.values()
        return next((each for view in views for each in view.workers.values() if each.endpoint == endpoint), None)

    def _prefill_stage(
        self, request: FrontendServiceGenerateRequest, view: ComponentView, through: Workers | None
    ) -> PrefillStage | None:
        if self._disaggregation is None:
            return None
        return self._disaggregation.stage(request, view, through or self._workers)

    def _pools_of(
        self, request: FrontendServiceGenerateRequest, tokens: int, model: str, through: Workers | None
    ) -> RequestPools:
        """Returns the pools that can serve a request, of which there are several now.

        Args:
            request: The request.
            tokens: Tokens of its prompt.
            model: Its model or LoRA adapter.
            through: Starts the attempts at workers with an OpenAI API; None for any worker.
        """

        def views() -> Sequence[ComponentView]:
            found, _ = resolve_model(model, self._directory.components)
            if through is not None and self.may_forward:
                found = [view for view in found if view.name in self._forwarding] or found
            return fitting_pools(request, tokens, found)

        return RequestPools(
            request,
            views,
            self._pool_choice,
            self._workers.health,
            lambda view: self._prefill_stage(request, view, through),
        )

    def resolve(self, model: str) -> tuple[ComponentView, str]:
        """Returns the component that serves a model or LoRA adapter, and the adapter's name; empty for a base model.

        Of several components it is the one with the most live workers: all of a model share what texts need.

        Raises:
            UnknownModel: no component serves it.
        """
        views, lora_name = self._serving(model)
        return views[0], lora_name

    def _serving(self, model: str) -> tuple[list[ComponentView], str]:
        """Returns the components that serve a model or LoRA adapter, and the adapter's name; empty for a base model.

        Raises:
            UnknownModel: no component serves it.
        """
        if self.access is not None:
            # Texts are prepared, and requests forwarded, by their model before they are checked as a whole.
            self.access.enforce(lambda caller: check_model(caller, model), "")
        try:
            return resolve_model(model, self._directory.components)
        except UnknownModel as error:
            if self.access is None:
                raise
            raise UnknownModel(model, filter(self.access.caller().may_use, error.info.known_values)) from None

    @property
    def may_forward(self) -> bool:
        """Whether all workers of some model have an OpenAI API of their own."""
        components = self._directory.components
        if components is not self._forwarding_of:
            self._forwarding_of = components
            self._forwarding = {
                name
                for name, view in components.items()
                if view.workers and all(worker.openai_endpoint for worker in view.workers.values())
            }
        return bool(self._forwarding)

    def forwards_to(self, model: str) -> ComponentView | None:
        """Returns the largest component of a model whose workers all have an OpenAI API, if there is one."""
        views, _ = self._serving(model)
        if not self.may_forward:
            return None
        return next((view for view in views if view.name in self._forwarding), None)

    @property
    def worker_client(self) -> WorkerClient:
        """The connections to workers."""
        return self._workers

    def has_text(self, model: str) -> bool:
        """Returns whether the output of a model or LoRA adapter is returned as text."""
        if self.texts is None or not self.texts.any_loaded:
            return False
        return self.texts.find(self.resolve(model)[0].descriptor.model) is not None

    async def best_worker(self, request: BestWorkerRequest, *, deadline: Deadline) -> BestWorkerResponse:
        """Returns the rank that a request would go to. A named booking is made, in the session or under a lease.

        Raises:
            BadRequest, PromptTooLong, BlockSizeMismatch, UnknownModel, UnknownComponent, UnknownWorker, NoWorkers,
            AllBusy, RequestIdReused, TooLarge, DeadlineExceeded, DependencyAway.
        """
        booking = request.booking if request.HasField("booking") else None
        select = SelectWorkerRequest(request=request.request, booking=booking, lease_ms=request.lease_ms)
        if request.session_id:
            select.session_id = scheduler_session_id(self._own_session(request.session_id))
        component = await self._resolve_pool(select.request, request.booking.stage, deadline)
        if booking is not None and self.access is not None:
            own_booking(self.access.caller(), select.booking)
        avoided = self._workers.health.why_avoided(component)
        constraints = select.request.constraints
        constraints.avoided_worker_ids[:] = [*avoided, *constraints.avoided_worker_ids]
        constraints.avoided_reasons[:] = avoided.values()
        scheduler = self._links.scheduler(component)
        try:
            selection = await scheduler.select_worker(select, deadline=deadline)
        except SessionLost:
            # KeepSession has not reached this Scheduler yet. If no such call runs, the session ends by itself.
            await open_session(scheduler, self._own_session(request.session_id))
            selection = await scheduler.select_worker(select, deadline=deadline)
            return BestWorkerResponse(selection=selection, session_opened=True)
        return BestWorkerResponse(selection=selection)

    async def potential_loads(self, request: PotentialLoadsRequest, *, deadline: Deadline) -> PotentialLoadsResponse:
        """Returns the load that each rank would have with a request.

        Raises:
            BadRequest, PromptTooLong, BlockSizeMismatch, UnknownModel, UnknownComponent, UnknownWorker,
            DeadlineExceeded, DependencyAway.
        """
        asked = GetPotentialLoadsRequest(request=request.request)
        scheduler = self._links.scheduler(self._resolve(asked.request, Stage.STAGE_WHOLE))
        answer = await scheduler.get_potential_loads(asked, deadline=deadline)
        return PotentialLoadsResponse(loads=answer.loads)

    async def prefill_complete(self, request: PrefillCompleteRequest, *, deadline: Deadline) -> PrefillCompleteResponse:
        """Marks the prompt of a booking made by ``best_worker`` as computed.

        Raises:
            BadRequest, DeadlineExceeded, DependencyAway.
        """
        marking = MarkPrefillCompleteRequest(booking=request.booking)
        if self.access is not None:
            own_booking(self.access.caller(), marking.booking)
        answers = await self._ask_all(
            lambda scheduler, limit: scheduler.mark_prefill_complete(marking, deadline=limit), deadline
        )
        return PrefillCompleteResponse(known=any(answer.known for answer in answers))

    async def release(self, request: ReleaseRequest, *, deadline: Deadline) -> ReleaseResponse:
        """Ends a booking made by ``best_worker``.

        Raises:
            BadRequest, DeadlineExceeded, DependencyAway.
        """
        freeing = FreeRequest(booking=request.booking)
        if self.access is not None:
            own_booking(self.access.caller(), freeing.booking)
        answers = await self._ask_all(lambda scheduler, limit: scheduler.free(freeing, deadline=limit), deadline)
        return ReleaseResponse(known=any(answer.known for answer in answers))

    async def list_models(self, request: ListModelsRequest, *, deadline: Deadline) -> ListModelsResponse:  # noqa: ARG002
        """Returns the models that are served."""
        models = describe_models(self._directory.components)
        return ListModelsResponse(models=models if self.access is None else visible(self.access.caller(), models))

    async def get_worker_health(
        self,
        request: GetWorkerHealthRequest,
        *,
        deadline: Deadline,  # noqa: ARG002 - answered from memory
    ) -> GetWorkerHealthResponse:
        """Returns the health of each worker, as this Frontend sees it.

        Raises:
            BadRequest.
        """
        component = component_name(request.component) if request.HasField("component") else None
        return GetWorkerHealthResponse(workers=self._workers.health.status(component))

    @not_awaited_by_drain
    async def keep_session(
        self,
        request: KeepSessionRequest,
        *,
        deadline: Deadline,  # noqa: ARG002 - it lasts as long as the call
    ) -> AsyncGenerator[KeepSessionResponse, None]:
        """Keeps a client's session open until the call ends. Yields a response each time that a Scheduler opened it.

        Raises:
            BadRequest, DependencyAway.
        """
        if self.access is not None:
            request = KeepSessionRequest(
                session_id=self._own_session(request.session_id), client_name=request.client_name
            )
        async with aclosing(kept_session(request, self._links.schedulers)) as opened:
            async for response in opened:
                yield KeepSessionResponse(grace_ms=response.grace_ms)

    async def find_overlaps(self, request: FindOverlapsRequest, *, deadline: Deadline) -> FindOverlapsResponse:
        """Returns the overlap of each rank with a prompt, as an Indexer reports it.

        Raises:
            BadRequest, PromptTooLong, BlockSizeMismatch, UnknownModel, UnknownComponent, NotReady, DeadlineExceeded,
            DependencyAway.
        """
        asked = RoutingRequest()
        asked.CopyFrom(request.request)
        indexer = await self.indexers.indexer(self._resolve(asked, Stage.STAGE_WHOLE))
        query = FindMatchesRequest(
            component=asked.component,
            block_size=asked.block_size,
            scope=asked.scope,
            multimodal_hashes=asked.multimodal_hashes,
        )
        if asked.HasField("local_hashes"):
            query.local_hashes.CopyFrom(asked.local_hashes)
        else:
            query.token_ids.CopyFrom(asked.token_ids)
        return FindOverlapsResponse(matches=await indexer.find_matches(query, deadline=deadline))

    async def dump_index(
        self, request: DumpIndexRequest, *, deadline: Deadline
    ) -> AsyncGenerator[DumpIndexResponse, None]:
        """Yields an Indexer's whole index of a component in chunks, rank by rank.

        Raises:
            BadRequest, UnknownModel, UnknownComponent, NotReady, DeadlineExceeded, DependencyAway.
        """
        named = request.HasField("component")
        component = component_name(request.component) if named else self._view(request.model).name
        indexer = await self.indexers.indexer(component)
        dump = DumpRequest(component=Component(namespace=component.namespace, name=component.name))
        async with aclosing(indexer.dump(dump, deadline=deadline)) as parts:
            async for part in parts:
                yield DumpIndexResponse(state=part.state)

    async def set_busy_threshold(self, request: SetBusyThresholdRequest, *, deadline: Deadline) -> BusyThresholds:
        """Sets the given busy thresholds of a model. Returns those in force.

        Raises:
            KvRouterError: the model is unknown, or the thresholds cannot be stored.
        """
        scheduler = self._links.scheduler(self._view(request.model).name)
        return (await scheduler.set_busy_threshold(request, deadline=deadline)).thresholds

    async def busy_thresholds(self, *, deadline: Deadline) -> dict[str, BusyThresholds]:
        """Returns the busy thresholds in force, for every model that has one.

        Raises:
            KvRouterError: a Scheduler does not answer.
        """
        thresholds: dict[str, BusyThresholds] = {}
        for scheduler in self._links.deciding_schedulers():
            answer = await scheduler.list_busy_thresholds(ListBusyThresholdsRequest(), deadline=deadline)
            thresholds.update(answer.thresholds)
        return thresholds

    async def _ask_all(
        self, ask: Callable[[Scheduler, Deadline], Awaitable[_Answer]], deadline: Deadline
    ) -> list[_Answer]:
        """Calls every live Scheduler about a booking, since a stand-in may have made it while the usual one was away.

        A Scheduler that fails or times out matters only if no other Scheduler knows the booking.

        Raises:
            DependencyAway: no Scheduler is live.
            KvRouterError: no Scheduler knows the booking, and one that might know it failed.
        """
        schedulers = self._links.schedulers()
        if not schedulers and self._directory.components:
            raise DependencyAway("no Scheduler is registered and ready: check that one runs in this namespace")
        limit = deadline.within(HEARTBEAT_TIMEOUT_SECONDS)
        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(_settled(ask(each, limit))) for each in schedulers]
        outcomes = [task.result() for task in asking]
        answers = [outcome for outcome in outcomes if not isinstance(outcome, KvRouterError)]
        for outcome in outcomes:
            if isinstance(outcome, KvRouterError) and not any(answer.known for answer in answers):
                if isinstance(outcome, DeadlineExceeded) and not deadline.expired:
                    raise DependencyAway("a Scheduler that may have the booking does not answer")
                raise outcome.untraced()
        return answers

    def _own_session(self, session_id: str) -> str:
        """Returns the id of a client's session, which is one of its tenant."""
        return session_id if self.access is None else owned_id(self.access.caller(), session_id)

    def _check_access(self, request: RoutingRequest, model: str) -> None:
        access = self.access
        if access is not None:
            isolates = access.isolates_tenants
            access.enforce(
                lambda caller: rules.check_routing(caller, request, model, isolates_tenants=isolates), "SchedulerCall"
            )
            access.grant(0, "SchedulerCall").end()

    def _view(self, model: str, stage: Stage = Stage.STAGE_WHOLE) -> ComponentView:
        return pools_of_model(model, self._directory.components, stage)[0]

    async def _resolve_pool(self, request: RoutingRequest, stage: Stage, deadline: Deadline) -> ComponentName:
        """Does the same as ``_resolve``, but of several components of the model takes the one where it costs least."""
        is_named = request.HasField("component")
        name = self._resolve(request, stage)
        views = [] if is_named else pools_of_model(request.model, self._directory.components, stage)
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

    def _resolve(self, request: RoutingRequest, stage: Stage) -> ComponentName:
        """Checks a request, and sets its component where it names only a model. No Scheduler then looks it up again."""
        check_routing(request, self.options.limits)
        if request.HasField("component"):
            name = component_name(request.component)
            view = self._directory.components.get(name)
            self._check_access(request, "" if view is None else view.descriptor.model)
            return name
        self._check_access(request, request.model)
        view = self._view(request.model, stage)
        request.component.CopyFrom(view.descriptor.component)
        return view.name


async def _settled(requested: Awaitable[_Answer]) -> _Answer | KvRouterError:
    try:
        return await requested
    except KvRouterError as error:
        return error
