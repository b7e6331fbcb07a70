"""The calls of a router, whatever carries them."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from contextlib import aclosing
from types import TracebackType
from typing import Self, Unpack, cast

from kvrouter.client.calls import Calls
from kvrouter.client.errors import ClientClosed, WrongEventLoop
from kvrouter.client.options import (
    GenerateOptions,
    OutputOptions,
    Prompt,
    RequestOptions,
    RouterConfigOverride,
    RoutingOptions,
    generate_request,
    routing_request,
)
from kvrouter.client.results import (
    BestWorker,
    Generation,
    Model,
    PotentialLoad,
    best_worker_of,
    model_of,
    output_of,
    potential_load_of,
    rank_events,
)
from kvrouter.client.session import BookingSession
from kvrouter.v1.errors import BadRequest
from kvrouter.v1.frontend_pb2 import (
    FrontendServiceDumpRequest,
    FrontendServiceFindMatchesRequest,
    FrontendServiceGetPotentialLoadsRequest,
    FrontendServiceSelectWorkerRequest,
    ListModelsRequest,
)
from kvrouter.v1.pages import all_pages

MAX_REQUEST_ID_BYTES = 112
"""Longest id of a request; the rest of a booking id's 128 bytes makes it unique."""


class RoutingCalls(ABC):
    """The common calls of ``Client`` and ``Router``. Every call raises ``kvrouter.client.KvRouterError``."""

    def __init__(self, *, model: str, name: str, timeout: float | None) -> None:
        self._model = model
        self._name = name
        self._timeout = timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._session: BookingSession | None = None

    async def generate(
        self, token_ids: Prompt | None = None, model: str = "", **options: Unpack[GenerateOptions]
    ) -> Generation:
        """Routes a request and runs it. Returns when its first output has arrived.

        Args:
            token_ids: The prompt; None if ``prompt_text`` has it.
            model: Name of the model or LoRA adapter; empty for the client's.
            options: See ``GenerateOptions``.
        """
        calls = self._ready()
        request = generate_request(token_ids, model or self._model, options)
        responses = calls.stream("Generate", request, options.get("timeout", self._timeout))
        try:
            first = output_of(await anext(responses))
        except BaseException:
            await responses.aclose()
            raise
        return Generation(responses, first)

    async def random(
        self, token_ids: Prompt | None = None, model: str = "", **options: Unpack[GenerateOptions]
    ) -> Generation:
        """Runs a request on a worker chosen at random; see ``generate``."""
        return await self.generate(token_ids, model, **_with_mode(options, "random"))

    async def round_robin(
        self, token_ids: Prompt | None = None, model: str = "", **options: Unpack[GenerateOptions]
    ) -> Generation:
        """Runs a request on the workers in turn; see ``generate``."""
        return await self.generate(token_ids, model, **_with_mode(options, "round-robin"))

    async def direct(
        self,
        worker_id: int,
        token_ids: Prompt | None = None,
        model: str = "",
        *,
        dp_rank: int | None = None,
        **options: Unpack[OutputOptions],
    ) -> Generation:
        """Runs a request on one worker; see ``generate``. It is not retried elsewhere.

        Args:
            worker_id: The worker.
            token_ids: The prompt; None if ``prompt_text`` has it.
            model: Name of the model or LoRA adapter; empty for the client's.
            dp_rank: The rank of the worker; None for the least loaded one.
            options: See ``OutputOptions``.
        """
        if worker_id is None:
            raise BadRequest("no worker was named", field="worker_id", advice="Pass the id of a worker.")
        placed = cast(GenerateOptions, {**options, "worker_id": worker_id, "dp_rank": dp_rank})
        return await self.generate(token_ids, model, **_with_mode(placed, "direct"))

    async def best_worker(
        self,
        token_ids: Prompt,
        router_config_override: RouterConfigOverride | None = None,
        request_id: str | None = None,
        *,
        model: str = "",
        **options: Unpack[RequestOptions],
    ) -> BestWorker:
        """Returns the worker a request would go to.

        Args:
            token_ids: The prompt.
            router_config_override: Routing options of this request.
            request_id: Id to book the request's load under, until ``free`` or the end of this client; None to book
                nothing.
            model: Name of the model; empty for the client's.
            options: See ``RequestOptions``.
        """
        calls = self._ready()
        routing = cast(RoutingOptions, {**options, "router_config_override": router_config_override})
        request = FrontendServiceSelectWorkerRequest(request=routing_request(token_ids, model or self._model, routing))
        timeout = options.get("timeout", self._timeout)
        if request_id is None:
            return best_worker_of((await calls.unary("SelectWorker", request, timeout)).selection)
        if not isinstance(request_id, str) or not 1 <= len(request_id.encode()) <= MAX_REQUEST_ID_BYTES:
            raise BadRequest(
                f"expected a request id of 1 to {MAX_REQUEST_ID_BYTES} bytes",
                field="request_id",
                advice="Pass a shorter text, or None to book nothing.",
            )
        return best_worker_of(await self._bookings(calls).book(request_id, request, timeout))

    async def best_worker_id(
        self,
        token_ids: Prompt,
        router_config_override: RouterConfigOverride | None = None,
        request_id: str | None = None,
        *,
        model: str = "",
        **options: Unpack[RequestOptions],
    ) -> tuple[int, int]:
        """Returns worker id and overlap blocks of ``best_worker``, as Dynamo's call of this name."""
        best = await self.best_worker(token_ids, router_config_override, request_id, model=model, **options)
        return best.worker_id, best.overlap_blocks

    async def get_potential_loads(
        self, token_ids: Prompt, *, model: str = "", **options: Unpack[RoutingOptions]
    ) -> list[PotentialLoad]:
        """Returns the load every rank would have with a request; see ``RoutingOptions``."""
        calls = self._ready()
        request = FrontendServiceGetPotentialLoadsRequest(
            request=routing_request(token_ids, model or self._model, options)
        )
        answer = await calls.unary("GetPotentialLoads", request, options.get("timeout", self._timeout))
        return [potential_load_of(load) for load in answer.loads]

    async def mark_prefill_complete(self, request_id: str) -> bool:
        """Marks the prefill of a booking made by ``best_worker`` as complete. Returns whether the booking exists."""
        return await self._bookings(self._ready()).mark_prefill_complete(request_id, self._timeout)

    async def free(self, request_id: str) -> bool:
        """Frees a booking made by ``best_worker``. Returns whether it existed."""
        return await self._bookings(self._ready()).free(request_id, self._timeout)

    async def find_matches_for_request(
        self, token_ids: Prompt, *, model: str = "", **options: Unpack[RoutingOptions]
    ) -> dict[int, int]:
        """Returns how many leading blocks of a prompt each worker has in device memory, its best rank counting.

        Workers without any are left out. ``RoutingOptions`` for the choice of a worker have no effect.
        """
        calls = self._ready()
        request = FrontendServiceFindMatchesRequest(request=routing_request(token_ids, model or self._model, options))
        answer = await calls.unary("FindMatches", request, options.get("timeout", self._timeout))
        blocks: dict[int, int] = {}
        for overlap in answer.overlaps:
            if count := overlap.device_blocks:
                worker_id = overlap.rank.worker_id
                blocks[worker_id] = max(count, blocks.get(worker_id, 0))
        return blocks

    async def dump_events(self, *, model: str = "", timeout: float | None = None) -> str:  # noqa: ASYNC109 - gRPC's
        """Returns the index of a model as JSON: a list of events to build it.

        Args:
            model: Name of the model; empty for the client's.
            timeout: Deadline, seconds; None for the client's.
        """
        calls = self._ready()
        events = []
        request = FrontendServiceDumpRequest(model=model or self._model)
        async with aclosing(calls.stream("Dump", request, timeout or self._timeout)) as parts:
            async for part in parts:
                events += rank_events(part.state)
        return json.dumps(events)

    async def list_models(self) -> list[Model]:
        """Returns the served models."""
        calls, request = self._ready(), ListModelsRequest()
        pages = all_pages(lambda asked: calls.unary("ListModels", asked, self._timeout), request)
        return [model_of(model) async for page in pages for model in page.models]

    async def __aenter__(self) -> Self:
        if self._loop is not None or self._closed:
            raise ClientClosed("expected a new client: this one was entered before. Make another one")
        self._loop = asyncio.get_running_loop()
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.aclose()
        await self._close()

    @abstractmethod
    async def _open(self) -> None:
        """Starts the transport of the calls."""

    @abstractmethod
    async def _close(self) -> None:
        """Ends the transport of ``_open``."""

    @property
    @abstractmethod
    def _calls(self) -> Calls:
        """Carries the calls, between ``_open`` and ``_close``."""

    def _ready(self) -> Calls:
        """Returns the transport of the calls.

        Raises:
            ClientClosed: the context is not entered, or left.
            WrongEventLoop: another event loop runs than when it was entered.
        """
        if self._loop is None or self._closed:
            state = "left" if self._closed else "not entered"
            raise ClientClosed(f"the client's context is {state}: use it inside of `async with`")
        if asyncio.get_running_loop() is not self._loop:
            raise WrongEventLoop(
                "expected the event loop in which the client's context was entered, received a call in another one: "
                "make a client in each loop, or use SyncClient"
            )
        return self._calls

    def _bookings(self, calls: Calls) -> BookingSession:
        if self._session is None:
            self._session = BookingSession(calls, self._name)
        return self._session


def _with_mode(options: GenerateOptions, mode: str) -> GenerateOptions:
    override = RouterConfigOverride(**{**(options.get("router_config_override") or {}), "mode": mode})
    return GenerateOptions(**{**options, "router_config_override": override})
