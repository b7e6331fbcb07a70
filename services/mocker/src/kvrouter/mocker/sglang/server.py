"""The HTTP API of an SGLang server."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import msgspec
from aiohttp import web
from kvrouter.mocker.engine.types import Scope
from kvrouter.mocker.openai.adapters import adapter_routes
from kvrouter.mocker.openai.bodies import ChatBody, CompletionBody, GenerationBody, parse
from kvrouter.mocker.openai.handler import streamed, tokenized, whole
from kvrouter.mocker.openai.responses import Responses
from kvrouter.mocker.openai.sampling import sampling
from kvrouter.mocker.rooms import PrefillRooms, await_prefill
from kvrouter.mocker.serving.errors import ApiError, refusals
from kvrouter.mocker.serving.generations import Generations, Sampling, Sequenced
from kvrouter.mocker.serving.http_responses import event, json_response, open_stream
from kvrouter.mocker.serving.service import EngineService
from kvrouter.mocker.sglang.generate import GenerateBody, GenerateResponse, SamplingBody
from kvrouter.mocker.sglang.metrics import SglangMetrics
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

VERSION = "0.5.23"
_MODES = {"both": "null", "prefill": "prefill", "decode": "decode"}
_ENGINE_TYPES = {"both": "unified", "prefill": "prefill", "decode": "decode"}


class _ChatBody(ChatBody, kw_only=True):
    engine: ClassVar[str] = "sglang"


@dataclass(frozen=True)
class SglangOptions:
    """What the server says of itself and accepts."""

    model: str
    model_path: str
    role: str
    """"both", "prefill" or "decode"."""
    context_length: int
    lora_modules: dict[str, str]
    reports_cached_tokens: bool
    incremental_streaming: bool
    server_info: Mapping[str, Any]
    """Further fields of ``/server_info``."""


class SglangServer:
    """The handlers."""

    def __init__(self, options: SglangOptions, service: EngineService, rooms: PrefillRooms) -> None:
        self._options = options
        self._service = service
        self._rooms = rooms
        self._started = time.time()
        self._registry = CollectorRegistry()
        self._registry.register(SglangMetrics(options.model, _ENGINE_TYPES[options.role], service.drivers))

    def routes(self) -> Sequence[web.RouteDef]:
        """Returns the routes."""
        return [
            web.get("/health", self.health),
            web.get("/health_generate", self.health),
            web.get("/server_info", self.server_info),
            web.get("/get_server_info", self.server_info),
            web.get("/model_info", self.model_info),
            web.get("/get_model_info", self.model_info),
            web.get("/metrics", self.metrics),
            web.get("/v1/loads", self.loads),
            web.get("/v1/models", self.models),
            web.post("/generate", self.generate),
            web.post("/abort_request", self.abort_request),
            web.post("/flush_cache", self.flush_cache),
            web.get("/flush_cache", self.flush_cache),
            web.post("/v1/completions", self.completions),
            web.post("/v1/chat/completions", self.chat_completions),
            web.post("/tokenize", self.tokenize),
            *adapter_routes("", self._options.lora_modules),
        ]

    async def health(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Returns 200 with an empty body."""
        return web.Response()

    async def server_info(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Returns the configuration, with the sockets of the KV events."""
        options = self._options
        lora = [{"lora_name": name, "lora_path": path} for name, path in options.lora_modules.items()]
        known = {
            "model_path": options.model_path,
            "served_model_name": options.model,
            "tokenizer_path": options.model_path,
            "context_length": options.context_length,
            "disaggregation_mode": _MODES[options.role],
            "incremental_streaming_output": options.incremental_streaming,
            "enable_lora": bool(lora),
            "lora_paths": lora or None,
            "max_req_input_len": options.context_length - 1,
            "startup_time": self._started,
            "version": VERSION,
        }
        return json_response(known | dict(options.server_info))

    async def model_info(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Describes the model."""
        path = self._options.model_path
        described = {"model_path": path, "served_model_name": self._options.model, "tokenizer_path": path}
        mode = _MODES[self._options.role]
        return json_response(
            described | {"is_generation": True, "weight_version": "default", "disaggregation_mode": mode}
        )

    async def metrics(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Returns the metrics."""
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def loads(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Returns the load of each rank."""
        loads = []
        for dp_rank, driver in self._service.drivers.items():
            load, config = driver.engine.load(), driver.engine.config
            used = load.active_blocks * config.block_size
            loads.append(
                {
                    "dp_rank": dp_rank,
                    "num_running_reqs": load.running,
                    "num_waiting_reqs": load.waiting,
                    "num_waiting_uncached_tokens": load.prefill_tokens,
                    "num_used_tokens": used,
                    "num_total_tokens": used + load.prefill_tokens,
                    "max_total_num_tokens": config.capacity_tokens,
                    "token_usage": used / config.capacity_tokens,
                    "max_running_requests": config.max_sequences,
                }
            )
        return json_response({"version": VERSION, "loads": loads})

    async def models(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Lists the model and its adapters."""
        options = self._options
        card = {"object": "model", "created": int(self._started), "owned_by": "sglang"}
        own = {"root": options.model, "parent": None, "max_model_len": options.context_length}
        data = [{"id": options.model} | card | own]
        for name, path in options.lora_modules.items():
            data.append({"id": name} | card | {"root": path, "parent": options.model, "max_model_len": None})
        return json_response({"object": "list", "data": data})

    async def flush_cache(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Empties the cache of every rank, unless there are requests."""
        if self._service.running:
            return web.Response(status=400, text="Flush cache failed.\n")
        for driver in self._service.drivers.values():
            driver.clear_cache()
        return web.Response(text="Cache flushed.\n")

    async def abort_request(self, request: web.Request) -> web.Response:
        """Aborts all requests whose id begins with the id of a running one."""
        body = parse(await request.read(), _AbortBody)
        running = self._service.request_ids()
        if body.abort_all:
            self._service.abort(running)
        elif body.rid and body.rid in running:
            self._service.abort([each for each in running if each.startswith(body.rid)])
        return web.Response()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Generates the output of one prompt."""
        body = parse(await request.read(), GenerateBody)
        prompt, rid = body.prompt(), body.rid or uuid.uuid4().hex
        wanted = (body.sampling_params or SamplingBody()).sampling(len(prompt), self._options.context_length)
        scope = self._scope(body.lora_path, body.cache_salt, body.extra_key)
        sequence = Sequenced(rid, prompt, self._limited(wanted), scope)
        async with self._transfer(body):
            generations = Generations(self._service, [sequence], self._rank(body))
            with closing(generations):
                with refusals():
                    generations.start()
                response = GenerateResponse(
                    rid,
                    len(prompt),
                    generations.dp_rank,
                    incremental=body.stream and self._options.incremental_streaming,
                    logprobs=bool(body.return_logprob),
                )
                if body.stream:
                    stream = await open_stream(request)
                    async for _, piece in generations.pieces():
                        await stream.write(event(response.add(piece)))
                    await stream.write(b"data: [DONE]\n\n")
                    return stream
                answer: dict[str, Any] = {}
                async for _, piece in generations.pieces():
                    answer = response.add(piece)
                return json_response(answer)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Completes one or several prompts."""
        return await self._complete(request, parse(await request.read(), CompletionBody), chat=False)

    async def tokenize(self, request: web.Request) -> web.Response:
        """Returns the token ids of a chat."""
        return tokenized(parse(await request.read(), _ChatBody))

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """Completes a chat."""
        return await self._complete(request, parse(await request.read(), _ChatBody), chat=True)

    async def _complete(self, request: web.Request, body: GenerationBody, *, chat: bool) -> web.StreamResponse:
        options, prompts = self._options, body.prompts()
        rid = body.rid or uuid.uuid4().hex
        base, _, adapter = (body.model or "").partition(":")
        scope = self._scope(body.lora_path or adapter, body.cache_salt, body.extra_key)
        many = len(prompts) * body.choices > 1
        sequences = [
            Sequenced(
                f"{rid}_{number}_{choice}" if many else rid,
                prompt,
                self._limited(sampling(body, len(prompt), options.context_length)),
                scope,
                choice=choice,
            )
            for number, prompt in enumerate(prompts)
            for choice in range(body.choices)
        ]
        responses = Responses(
            body,
            rid,
            body.model or base or options.model,
            prompts,
            chat=chat,
            reports_cached_tokens=options.reports_cached_tokens,
            stop_field="matched_stop",
        )
        async with self._transfer(body):
            generations = Generations(self._service, sequences, self._rank(body))
            if body.stream:
                return await streamed(request, generations, responses)
            return await whole(generations, responses, lambda response, _: response)

    def _scope(self, adapter: str | None, cache_salt: str | None, extra_key: str | None) -> Scope:
        if adapter and adapter not in self._options.lora_modules:
            raise ApiError(400, f"The following requested LoRA adapters are not loaded: {adapter}")
        # SGLang's earlier releases append one to the other. Clients of all releases send the same in both.
        further = extra_key if extra_key and extra_key != cache_salt else ""
        return Scope(lora_name=adapter or "", cache_salt=(cache_salt or "") + further)

    def _limited(self, wanted: Sampling) -> Sampling:
        """Returns what the server's role leaves of the output: a prefill server generates one token."""
        return replace(wanted, max_tokens=1) if self._options.role == "prefill" else wanted

    def _rank(self, body: GenerateBody | GenerationBody) -> int | None:
        """Returns the requested rank. Without one, prompts of bootstrap rooms are spread by their room."""
        requested = body.data_parallel_rank if body.routed_dp_rank is None else body.routed_dp_rank
        if requested is None and self._options.role == "prefill" and body.bootstrap_room is not None:
            return body.bootstrap_room % len(self._service.drivers)
        return requested

    @asynccontextmanager
    async def _transfer(self, body: GenerateBody | GenerationBody) -> AsyncIterator[None]:
        """Meets the other leg, if the server has a role. The body generates the output.

        Raises:
            ApiError: the request names no room, or the other leg does not come.
        """
        if self._options.role == "both":
            yield
            return
        if body.bootstrap_room is None:
            raise ApiError(400, f"Disaggregated request received without bootstrap room id. req.rid={body.rid!r}")
        if self._options.role == "prefill":
            async with self._rooms.prefill(body.bootstrap_room):
                yield
            return
        if not body.bootstrap_host or not body.bootstrap_port:
            raise ApiError(400, "Disaggregated request received without bootstrap host and port.")
        await await_prefill(body.bootstrap_host, body.bootstrap_port, body.bootstrap_room)
        yield


class _AbortBody(msgspec.Struct):
    rid: str = ""
    abort_all: bool = False


def is_open(path: str) -> bool:
    """Returns whether a path needs no key."""
    return path.startswith(("/health", "/metrics"))
