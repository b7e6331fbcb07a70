"""Chooses and books the rank serving a gateway's request."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Collection, Mapping
from functools import partial
from typing import NamedTuple

import aiohttp
import structlog
from kvrouter.frontend.edge.frame import KV_SOURCE_HEADER, kv_source_text
from kvrouter.frontend.edge.model_name import renamed
from kvrouter.frontend.edge.request_fields import RANK_HEADER
from kvrouter.frontend.packed_prompt import hash_prompt, with_content
from kvrouter.frontend.proxy.endpoint_picker.engines import EngineAddresses, EngineWatch, Pick
from kvrouter.frontend.proxy.engine_request import check_salted, permitted
from kvrouter.frontend.proxy.forwarding import generate_request
from kvrouter.frontend.proxy.routed_body import RoutedBody
from kvrouter.frontend.request.attempt_input import set_routing
from kvrouter.frontend.request.model_choice import ModelChoices
from kvrouter.frontend.request.model_pools import describe_models, of_pool, resolve_model
from kvrouter.frontend.request.request_runner import RequestRunner
from kvrouter.frontend.workers.health import WorkerHealth
from kvrouter.frontend.workers.poison_prompts import RequestDeaths
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import ComponentView, Directory
from kvrouter.runtime.requests import check_prompt_length, longest_prompt
from kvrouter.v1.common_pb2 import BookingKey, Stage
from kvrouter.v1.errors import KvRouterError, NoWorkers
from kvrouter.v1.frontend_pb2 import RoutedOn
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import SelectWorkerRequest

log = structlog.get_logger(component="endpoint-picker")

# Reading one from its enum takes over a microsecond.
_WHOLE, _ON_LOAD = Stage.STAGE_WHOLE, RoutedOn.ROUTED_ON_LOAD
_FALLBACKS = 2
"""Further endpoints named with each pick, for gateways that retry."""


class Servers(NamedTuple):
    """Who may serve a request."""

    views: list[ComponentView]
    """The components, at least one."""
    lora_name: str
    """LoRA adapter of the request; empty for none."""

    @property
    def model(self) -> str:
        """The served model."""
        return self.views[0].model


class _Offer(NamedTuple):
    """A pool serving the model of a request."""

    view: ComponentView
    endpoints: Mapping[int, str]
    """Addresses of the OpenAI APIs of its workers the gateway allows, host:port."""
    selection: SelectWorkerRequest
    """The call of the pool's Scheduler."""
    hashes: bytes
    """Hashes of its prompt in the pool's blocks."""

    @classmethod
    def of(
        cls,
        view: ComponentView,
        body: RoutedBody,
        lora_name: str,
        allowed: Collection[str] | None,
        addresses: EngineAddresses,
        health: WorkerHealth,
    ) -> _Offer:
        """Returns a pool's offer to a request; ``allowed`` as in ``Picker.pick``."""
        endpoints = addresses.of_workers(view)
        if allowed is not None or body.salted_path:
            endpoints = {
                worker_id: endpoint
                for worker_id, endpoint in endpoints.items()
                if (allowed is None or endpoint in allowed) and body.may_run_at(view.workers[worker_id])
            }
        request = generate_request(body, "")
        request.use_adapter(view.model, lora_name)
        hashes = hash_prompt(body.token_ids, request, view.block_size)
        selection = SelectWorkerRequest()
        routing = selection.request  # Set in place: a message that is passed to a constructor is encoded and decoded.
        set_routing(routing, request, view, hashes, body.prompt_tokens, is_estimated=body.is_estimated)
        # A request with empty constraints costs the Scheduler as much as a constrained one.
        if len(endpoints) != len(view.workers):
            routing.constraints.allowed_worker_ids.extend(endpoints)
        if avoided := health.avoided(view.name):
            routing.constraints.avoided_workers.extend(avoided)
        return cls(view, endpoints, selection, hashes)

    def takes(self, body: RoutedBody) -> bool:
        """Returns whether the pool's workers take prompts of that length."""
        return body.is_estimated or body.prompt_tokens <= longest_prompt(self.view.max_model_len)

    def check(self, body: RoutedBody) -> None:
        """Checks that the pool can serve the request.

        Raises:
            PromptTooLong: the prompt is too long for its workers.
            NoWorkers: none of its workers has an OpenAI API the gateway allows.
        """
        if not body.is_estimated:
            check_prompt_length(body.prompt_tokens, self.view.max_model_len)
        if not self.endpoints:
            allowed = ", or none that the gateway allows"
            raise NoWorkers(f"no worker of model {self.view.model!r} has an OpenAI endpoint{allowed}")


class Picker:
    """Picks for all requests of a gateway."""

    def __init__(
        self, directory: Directory, runner: RequestRunner, choices: ModelChoices, session: aiohttp.ClientSession
    ) -> None:
        """Creates it.

        Args:
            directory: Components and workers.
            runner: The Frontend's own requests, with whose limits, links, health and counts it picks.
            choices: The models for the names that clients send.
            session: Connections to engines, to see whether one lives.
        """
        self._choices = choices
        self.addresses = EngineAddresses(directory)
        self.settings = runner.settings
        self._conversations = runner.conversations
        self.access = runner.access
        self.admission = runner.admission
        self._directory = directory
        self._session = session
        self._poison_prompts = runner.poison_prompts
        self._metrics = runner.metrics.models
        self._texts = runner.models.texts
        self._links = runner.links
        self._choice = runner.pool_choice
        self._health = runner.workers.health

    @property
    def ready(self) -> bool:
        """Whether requests can be routed."""
        return self._directory.is_synced and self._links.ready()

    async def read(
        self, body: bytearray, path: str, *, is_json: bool, headers: Mapping[str, str]
    ) -> tuple[RoutedBody, bytearray]:
        """Returns a request as routing needs it, its prompt tokenized if possible, and the engine's body.

        Args:
            body: The client's body.
            path: Path of the engine's API.
            is_json: Whether the body can be read.
            headers: Headers of the request.

        Raises:
            KvRouterError: the body cannot be routed, the model is unknown, or the caller may not use it.
        """
        limit = self.settings.max_prompt_tokens
        api_path = path.partition("?")[0]
        routed = await RoutedBody.read(body, self._texts.work, api_path, max_prompt_tokens=limit, is_json=is_json)
        model, pool = routed.model or self._only_model(), ""
        conversation = self._conversations.of(
            headers, conversation_id=routed.conversation_id, prompt_cache_key=routed.prompt_cache_key
        )
        choice = self._choices.first(model, conversation, headers) if is_json else None
        if choice is not None:
            model, pool = choice.model, choice.pool
            if model != choice.name:
                body = await self._texts.work.read(partial(renamed, model=model), body)
        routed.choose(model, headers, conversation, pool)
        if self.access is not None:
            routed, passed = await permitted(self.access, routed, body, path, self._texts.work)
            body = bytearray(passed)
            check_salted(self.access, routed, self.resolve(routed).views)
        model = self.resolve(routed).model
        await routed.tokenize(self._texts, model, max_prompt_tokens=limit)
        return routed, body

    def deaths(self, body: RoutedBody, model: str, tenant: str) -> RequestDeaths:
        """Returns the counter of deaths of a tenant's request to a served model.

        Raises:
            PoisonPrompt: workers died of its prompt.
        """
        content = () if body.media is None else body.media.hashes
        prompt = with_content(body.token_ids, content)
        deaths = RequestDeaths(self._poison_prompts, tenant, model, prompt)
        deaths.check()
        return deaths

    async def pick(
        self,
        body: RoutedBody,
        servers: Servers,
        deaths: RequestDeaths,
        *,
        request_id: str,
        allowed: Collection[str] | None,
        deadline: Deadline,
    ) -> Pick:
        """Chooses and books a rank.

        Args:
            body: The request as routing needs it.
            servers: Who may serve it.
            deaths: Counts the deaths of engines running it.
            request_id: Id of the request, for logs.
            allowed: Endpoints that may serve it, host:port; None for all.
            deadline: Time by which the choice must be made.

        Raises:
            KvRouterError: the model is unknown, every eligible worker is busy, none is eligible, or no Scheduler
                answers.
        """
        offers = [
            _Offer.of(view, body, servers.lora_name, allowed, self.addresses, self._health) for view in servers.views
        ]
        able = [offer for offer in offers if offer.endpoints] or [offers[0]]
        able = [offer for offer in able if offer.takes(body)] or [able[0]]
        if len(able) > 1:
            routing = {offer.view.name: offer.selection.request for offer in able}
            order = await self._choice.cheapest_first(
                [offer.view for offer in able], lambda view: routing[view.name], deadline
            )
            able = [offer for offer in able if offer.view.name == order[0].name]
        offer = able[0]
        offer.check(body)
        return await self._book(offer, body, deaths, request_id, deadline)

    async def _book(
        self, offer: _Offer, body: RoutedBody, deaths: RequestDeaths, request_id: str, deadline: Deadline
    ) -> Pick:
        view, endpoints, select, hashes = offer.view, offer.endpoints, offer.selection, offer.hashes
        link = self._links.link(view.name, hashes, body.conversation_id)
        # A client may reuse its request id, but the key of a freed booking cannot be booked again.
        key = BookingKey(request_id=f"{request_id}~{secrets.token_hex(4)}", stage=_WHOLE)
        select.arrived_unix_ns = time.time_ns()
        selection, booking = await link.book(key, select, hashes, deadline=deadline)
        chosen = booking.rank.worker_id
        fallbacks = self._fallbacks(view.name, endpoints, chosen)
        headers = self.settings.engine_keys.headers(view.name.name)
        if len(view.workers[chosen].ranks) > 1:
            headers[RANK_HEADER] = str(booking.rank.dp_rank)
        if "kv_source" in selection:
            headers[KV_SOURCE_HEADER] = kv_source_text(selection.kv_source)
        return Pick(
            booking,
            link,
            [endpoints[chosen], *fallbacks],
            headers,
            EngineWatch(view.workers[chosen], self._health, deaths, self._session),
            self._metrics.of(view.model),
            selection.overlap_blocks,
            _ON_LOAD if selection.load_only else body.routed_on(view),
        )

    def any_endpoints(self, allowed: Collection[str] | None) -> tuple[list[str], dict[str, str]]:
        """Returns healthy endpoints of one component in random order, and headers for them; books nothing.

        They are for a request running no model.

        Raises:
            NoWorkers: there are none among those allowed.
        """
        endpoints = [
            (endpoint, name.name)
            for name in self._directory.components
            for worker in self._health.healthy(name)
            if (endpoint := self.addresses.of(worker)) and (allowed is None or endpoint in allowed)
        ]
        if not endpoints:
            raise NoWorkers("no healthy worker has an OpenAI endpoint that the gateway allows")
        random.shuffle(endpoints)
        component = endpoints[0][1]
        same = [endpoint for endpoint, name in endpoints if name == component]
        return same[: 1 + _FALLBACKS], self.settings.engine_keys.headers(component)

    async def follow(
        self, pick: Pick, served: str, body: RoutedBody, deaths: RequestDeaths, *, request_id: str, deadline: Deadline
    ) -> Pick:
        """Returns the pick of the endpoint that served a request instead of the chosen one.

        The load is booked there if it belongs to a worker; the former booking ends.
        """
        pick.end()
        log.info("request.served_by_fallback", request_id=request_id, worker=pick.booking.rank.worker_id, served=served)
        try:
            return await self.pick(
                body, self.resolve(body), deaths, request_id=request_id, allowed={served}, deadline=deadline
            )
        except KvRouterError as error:
            log.warning("fallback.not_booked", request_id=request_id, served=served, cause=error.message)
            return pick

    def resolve(self, body: RoutedBody) -> Servers:
        """Returns who may serve a request.

        Raises:
            UnknownModel, NoWorkers: nobody may.
        """
        views, lora_name = resolve_model(body.model, self._directory.components)
        return Servers(of_pool(views, body.pool), lora_name)

    def _only_model(self) -> str:
        """Returns the model of a request naming none, as engines take it; empty if several are served."""
        models = {model.name for model in describe_models(self._directory.components)}
        return models.pop() if len(models) == 1 else ""

    def _fallbacks(self, name: ComponentName, endpoints: Mapping[int, str], chosen: int) -> list[str]:
        healthy = [worker.worker_id for worker in self._health.healthy(name)]
        others = [endpoints[number] for number in healthy if number in endpoints and number != chosen]
        return random.sample(others, min(_FALLBACKS, len(others)))
