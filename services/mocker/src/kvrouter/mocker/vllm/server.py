"""The HTTP API of a vLLM server."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from kvrouter.mocker.engine.types import Scope
from kvrouter.mocker.openai.adapters import adapter_routes
from kvrouter.mocker.openai.bodies import ChatBody, CompletionBody, GenerationBody, parse
from kvrouter.mocker.openai.handler import streamed, tokenized, whole
from kvrouter.mocker.openai.messages import MessageResponses, MessagesBody
from kvrouter.mocker.openai.responses import Responses
from kvrouter.mocker.openai.sampling import sampling
from kvrouter.mocker.serving.errors import ApiError
from kvrouter.mocker.serving.generations import Generations, Sequenced
from kvrouter.mocker.serving.http_responses import json_response
from kvrouter.mocker.serving.service import EngineService
from kvrouter.mocker.vllm.media import SimulatedMedia
from kvrouter.mocker.vllm.metrics import VllmMetrics
from kvrouter.mocker.vllm.transfers import KvTransfers
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

VERSION = "0.33.0"
_GUARDED = ("/v1", "/v2", "/inference", "/cohere")


@dataclass(frozen=True)
class VllmOptions:
    """What the server says of itself and accepts."""

    model: str
    model_path: str
    max_model_len: int
    max_sequences: int
    lora_modules: dict[str, str]
    enable_prompt_tokens_details: bool
    priority_scheduling: bool
    kv_event_sources: Mapping[int, dict[str, Any]]


class VllmServer:
    """The handlers."""

    def __init__(
        self, options: VllmOptions, service: EngineService, transfers: KvTransfers, media: SimulatedMedia
    ) -> None:
        self._options = options
        self._service = service
        self._transfers = transfers
        self._media = media
        self._started = int(time.time())
        self._awake = asyncio.Event()
        self._awake.set()
        self._registry = CollectorRegistry()
        self._registry.register(VllmMetrics(options.model, service.drivers))

    def routes(self) -> Sequence[web.RouteDef]:
        """Returns the routes."""
        return [
            web.get("/health", self.health),
            web.get("/version", self.version),
            web.get("/load", self.load),
            web.get("/server_info", self.server_info),
            web.get("/metrics", self.metrics),
            web.get("/kv_event_sources", self.kv_event_sources),
            web.get("/v1/models", self.models),
            web.post("/v1/completions", self.completions),
            web.post("/v1/chat/completions", self.chat_completions),
            web.post("/v1/messages", self.messages),
            web.post("/tokenize", self.tokenize),
            *adapter_routes("/v1", self._options.lora_modules),
            web.post("/sleep", self.sleep),
            web.post("/wake_up", self.wake_up),
            web.get("/is_sleeping", self.is_sleeping),
            web.post("/reset_prefix_cache", self.reset_prefix_cache),
            *self._transfers.routes(),
        ]

    async def health(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Returns 200 with an empty body."""
        return web.Response()

    async def version(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Returns vLLM's version."""
        return json_response({"version": VERSION})

    async def load(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Returns the number of requests that have not ended."""
        return json_response({"server_load": self._service.running})

    async def server_info(self, request: web.Request) -> web.Response:
        """Returns the configuration, as vLLM does with VLLM_SERVER_DEV_MODE=1: as text unless JSON is asked for."""
        config = {"scheduler_config": {"max_num_seqs": self._options.max_sequences}}
        as_json = request.query.get("config_format") == "json"
        return json_response({"vllm_config": config if as_json else str(config)})

    async def metrics(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Returns the metrics."""
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def kv_event_sources(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Returns the sockets of each rank, by rank as vLLM 0.33 does."""
        return json_response({str(rank): source for rank, source in self._options.kv_event_sources.items()})

    async def models(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Lists the model and its adapters."""
        options = self._options
        card = {"object": "model", "created": self._started, "owned_by": "vllm"}
        base = {"root": options.model_path, "parent": None, "max_model_len": options.max_model_len}
        data = [{"id": options.model} | card | base]
        for name, path in options.lora_modules.items():
            data.append({"id": name} | card | {"root": path, "parent": options.model, "max_model_len": None})
        return json_response({"object": "list", "data": data})

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Empties the cache of every rank."""
        for driver in self._service.drivers.values():
            driver.clear_cache()
        return web.Response()

    async def sleep(self, request: web.Request) -> web.Response:
        """Sleeps, with an empty cache: further requests hang until the server is woken."""
        self._awake.clear()
        return await self.reset_prefix_cache(request)

    async def wake_up(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Ends the sleep."""
        self._awake.set()
        return web.Response()

    async def is_sleeping(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Returns whether the server sleeps."""
        return json_response({"is_sleeping": not self._awake.is_set()})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Completes one or several prompts."""
        return await self._generate(request, parse(await request.read(), CompletionBody), chat=False)

    async def tokenize(self, request: web.Request) -> web.Response:
        """Returns the token ids of a chat."""
        return tokenized(self._media.written(parse(await request.read(), ChatBody)))

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """Completes a chat."""
        return await self._generate(request, self._media.written(parse(await request.read(), ChatBody)), chat=True)

    async def messages(self, request: web.Request) -> web.StreamResponse:
        """Creates a message of the Anthropic API."""
        body = self._media.written(parse(await request.read(), MessagesBody).to_chat())
        return await self._generate(request, body, chat=True, form=MessageResponses)

    async def _generate(
        self, request: web.Request, body: GenerationBody, *, chat: bool, form: type[Responses] = Responses
    ) -> web.StreamResponse:
        await self._awake.wait()
        scope = self._scope(body)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "Stream options can only be defined when `stream=True`.", param="stream_options")
        if body.priority and not self._options.priority_scheduling:
            raise ApiError(400, f"Got priority {body.priority} but Priority scheduling is not enabled.")
        prompts = body.prompts()
        base_id = request.headers.get("X-Request-Id") or body.request_id or uuid.uuid4().hex
        response_id = f"{'chatcmpl' if chat else 'cmpl'}-{base_id}"
        suffix = uuid.uuid4().hex[:8]  # Clients may use an id twice.
        sequences = [
            Sequenced(
                f"{choice}_{response_id}-{number}-{suffix}",
                prompt,
                sampling(body, len(prompt), self._options.max_model_len),
                scope,
                choice=choice,
            )
            for number, prompt in enumerate(prompts)
            for choice in range(body.choices)
        ]
        generations = Generations(self._service, sequences, _requested_rank(request))
        responses = form(
            body,
            response_id,
            body.model or self._options.model,
            prompts,
            chat=chat,
            reports_cached_tokens=self._options.enable_prompt_tokens_details,
        )
        await self._transfers.receive(body.kv_transfer_params)
        if body.stream:
            return await streamed(request, generations, responses)

        def complete(response: dict[str, Any], ended: Generations) -> dict[str, Any]:
            returned = self._transfers.offer(body.kv_transfer_params, sequences[0], ended.dp_rank)
            return response | {"kv_transfer_params": returned}

        return await whole(generations, responses, complete)

    def _scope(self, body: GenerationBody) -> Scope:
        """Returns the scope of the prompt's blocks.

        Raises:
            ApiError: the model does not exist, or the salt is invalid.
        """
        model, options = body.model, self._options
        if model and model != options.model and model not in options.lora_modules:
            raise ApiError(404, f"The model `{model}` does not exist. Valid aliases: {options.model}.", param="model")
        if body.cache_salt == "":
            raise ApiError(400, "Parameter 'cache_salt' must be a non-empty string if provided.", param="cache_salt")
        return Scope(lora_name=model if model and model != options.model else "", cache_salt=body.cache_salt or "")


def is_open(path: str) -> bool:
    """Returns whether a path needs no key."""
    return not path.startswith(_GUARDED)


def _requested_rank(request: web.Request) -> int | None:
    """Returns the rank in the header; None if it is absent or no number, which vLLM ignores."""
    try:
        return int(request.headers.get("X-data-parallel-rank", ""))
    except ValueError:
        return None
