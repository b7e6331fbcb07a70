"""The HTTP API of a Frontend: chats, completions, models, busy thresholds, health and metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, TypeAlias

import aiohttp
import structlog
from aiohttp import web
from aiohttp.typedefs import Handler
from kvrouter.engines.fields import CHATS, COMPLETIONS, COUNT_TOKENS
from kvrouter.engines.routes import TAKE_TOKEN_IDS
from kvrouter.frontend.access.body_room import BodyTooLarge, current_room
from kvrouter.frontend.edge.busy_threshold import BusyThresholdBody, listed, shown
from kvrouter.frontend.edge.chat_request import parse_chat
from kvrouter.frontend.edge.completion_request import parse_completion
from kvrouter.frontend.edge.event_stream import EventStream, JsonResponse, StepWriter
from kvrouter.frontend.edge.frame import ResponseFrame
from kvrouter.frontend.edge.http_body import arrived_body, read_body
from kvrouter.frontend.edge.http_errors import INTERNAL, error_body, errors_as_json, with_retry_time
from kvrouter.frontend.edge.json_body import MAX_FIELDS_BYTES
from kvrouter.frontend.edge.messages_request import MessagesRequest
from kvrouter.frontend.edge.middlewares import (
    allowing,
    authenticated,
    cross_origin_headers,
    traced,
    within,
)
from kvrouter.frontend.edge.model_name import NamedModel, renamed
from kvrouter.frontend.edge.model_objects import model_objects, named_objects
from kvrouter.frontend.edge.request_fields import add_headers, checked_request_id, conversation_of, in_conversation
from kvrouter.frontend.edge.response_stream import NamedEvents
from kvrouter.frontend.edge.text_request import TextRequest
from kvrouter.frontend.edge.text_responses import CompletionStream, StreamedResponse, WholeCompletion, WholeResponse
from kvrouter.frontend.edge.text_runner import count_tokens, prepare, run_all
from kvrouter.frontend.edge.translated_request import TranslatedRequest, chat_prompt
from kvrouter.frontend.generate_request import GenerateRequest
from kvrouter.frontend.proxy.engine_connections import EngineConnections
from kvrouter.frontend.proxy.engine_request import check_salted, permitted, serves_itself, with_token_ids
from kvrouter.frontend.proxy.forwarded_response import ForwardedResponse, TranslatedResponse
from kvrouter.frontend.proxy.forwarding import EngineCalls, Engines, generate_request
from kvrouter.frontend.proxy.routed_body import TRANSLATED, RoutedBody
from kvrouter.frontend.request.current_choice import chosen_model
from kvrouter.frontend.service import FrontendService
from kvrouter.frontend.text.prompt_media import PromptMedia
from kvrouter.frontend.web.routes import PUBLIC_PATHS
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.v1.errors import BadRequest, KvRouterError, UnknownModel
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

log = structlog.get_logger(component="frontend")

_Body: TypeAlias = bytes | bytearray
_BodyHandler = Callable[[web.Request, _Body], Awaitable[web.StreamResponse]]
"""Handles a request whose body has been read."""

_MAX_BODY_BYTES = 64 << 20
_MAX_TOKEN_BYTES = 8
"""Maximum size of a text tokenized here, bytes for each token a prompt may have. Escaped Chinese has six
to eight. Decoding a text holds the GIL, about 1 ms for each MiB."""
_ROUTED = web.RequestKey("routed", RoutedBody)
"""What was read of a body when its model was chosen, until it is forwarded."""
_FORM_TYPE = "multipart/form-data"
_ADMIN_SECONDS = 10.0
"""Deadline of administrative calls: a few round trips to etcd."""


class HttpApi:
    """HTTP handlers over a FrontendService."""

    def __init__(
        self,
        frontend: FrontendService,
        registry: CollectorRegistry,
        *,
        metrics: Callable[[], Awaitable[bytes]] | None = None,
        page: Sequence[web.RouteDef] = (),
    ) -> None:
        """Creates the handlers.

        Args:
            frontend: The service.
            registry: Metrics of this process.
            metrics: Returns the metrics to expose instead of the registry's.
            page: Routes of the web page; none if it is not served.
        """
        self._settings = frontend.runner.settings
        self._conversations = frontend.runner.conversations
        self._page = page
        self._engines: Engines | None = None
        self._writer = StepWriter()
        self._frontend = frontend
        self._max_text_bytes = _MAX_TOKEN_BYTES * frontend.runner.limits.max_prompt_tokens + MAX_FIELDS_BYTES
        self._work = frontend.models.texts.work
        self._registry = registry
        self._metrics = metrics
        chats = self._max_text_bytes
        models: dict[str, Handler] = {
            COMPLETIONS: self._with_body(self._forwarding(self.completions, COMPLETIONS)),
            CHATS: self._with_body(self._forwarding(self.chat_completions, CHATS), chats),
            **{path: self._with_body(self._translating(kind), chats) for path, kind in TRANSLATED.items()},
            **{path: self._with_body(self.passed_on) for path in self._settings.engine_routes},
            COUNT_TOKENS: self._with_body(self.count_tokens, chats),
        }
        self._models = models
        origins = self._settings.cors_origins
        self._middlewares = [allowing(origins)] if origins else []
        self._middlewares.append(errors_as_json(frontend.runner.metrics.http_errors))
        if frontend.access is not None:
            open_paths = {"/health", *(PUBLIC_PATHS if page else ())}
            self._middlewares.append(authenticated(frontend.access, open_paths))
        # Last, so that clients that are refused start no trace.
        self._middlewares.append(traced(models))

    @property
    def posted(self) -> dict[str, Handler]:
        """The handlers of POST requests to models by path, within all middlewares."""
        return {path: within(self._middlewares, handler) for path, handler in self._models.items()}

    def application(self) -> web.Application:
        """Returns the application with all routes."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=self._middlewares)
        app.cleanup_ctx.append(self._connected)
        set_busy_threshold = self._with_body(self.set_busy_threshold, MAX_FIELDS_BYTES, has_model=False)
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/metrics", self.metrics),
                web.get("/v1/models", self.models),
                web.get("/v1/models/{model:.+}", self.model),
                *(web.post(path, handler) for path, handler in self._models.items()),
                web.get("/busy_threshold", self.list_busy_thresholds),
                web.post("/busy_threshold", set_busy_threshold),
                *self._page,
            ]
        )
        return app

    def _with_body(self, handler: _BodyHandler, limit: int = _MAX_BODY_BYTES, *, has_model: bool = True) -> Handler:
        """Returns a handler reading the body, up to ``limit`` bytes, into room it holds until its end.

        The limit of a body that has a model is higher while engines get it as it is: only they take images. The
        handler runs at the first model that can serve the client's name.
        """
        choices, models, idle_seconds = self._frontend.choices, self._frontend.models, self._settings.http_body_seconds
        admission = self._frontend.runner.admission

        async def handle(request: web.Request) -> web.StreamResponse:
            room = admission.room()
            current_room.set(room)  # The request has a task of its own.
            try:
                most = _MAX_BODY_BYTES if has_model and models.may_forward else limit
                body: _Body | None = arrived_body(request, room, limit=most)
                if body is None:
                    body = await read_body(request, room, limit=most, idle_seconds=idle_seconds)
                if has_model and choices.rules:
                    return await self._at_chosen_model(handler, request, body)
                return await handler(request, body)
            finally:
                room.end()

        return handle

    async def _at_chosen_model(self, handler: _BodyHandler, request: web.Request, body: _Body) -> web.StreamResponse:
        choices, named = self._frontend.choices, await self._named(request, body)
        conversation = conversation_of(request, self._conversations, named.conversation_id, named.prompt_cache_key)
        models = choices.of(named.model, conversation, request.headers)
        with in_conversation(conversation):
            if not models:
                return await handler(request, body)
            return await choices.serve(models, lambda _: handler(request, body))

    async def _named(self, request: web.Request, body: _Body) -> NamedModel | RoutedBody:
        """Returns the fields of a body that choose its model; those of a form choose none.

        If the body may be forwarded, what is read of it is kept for that.
        """
        if request.path in self._settings.engine_routes and request.content_type == _FORM_TYPE:
            return NamedModel()
        if not self._frontend.models.may_forward or request.path == COUNT_TOKENS:
            return await self._work.read(NamedModel.read, body)
        limit = self._frontend.runner.limits.max_prompt_tokens
        request[_ROUTED] = routed = await RoutedBody.read(body, self._work, request.path, max_prompt_tokens=limit)
        return routed

    async def _connected(self, app: web.Application) -> AsyncIterator[None]:  # noqa: ARG002
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
            with closing(EngineConnections()) as connections:
                self._engines = Engines(connections, session, self._frontend.runner)
                yield

    async def health(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Returns 200 if requests can be routed, otherwise 503."""
        ready = self._frontend.ready()
        if self._frontend.access is not None:
            # Probes have no credential, so they learn no names.
            return web.json_response({"status": "ready" if ready else "not ready"}, status=200 if ready else 503)
        body = {
            "status": "ready" if ready else "not ready",
            "models": {model.name: {"workers": model.workers} for model in self._frontend.served_models()},
            # A growing age means that etcd is away: workers may have come or gone since.
            "registrations_age_seconds": self._frontend.registrations_age_seconds,
        }
        return web.json_response(body, status=200 if ready else 503)

    async def metrics(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Returns the metrics of this Frontend."""
        body = generate_latest(self._registry) if self._metrics is None else await self._metrics()
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def models(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Lists the served models, each once, and their LoRA adapters."""
        return web.json_response({"object": "list", "data": list(self._model_objects().values())})

    async def model(self, request: web.Request) -> web.Response:
        """Returns one model or LoRA adapter."""
        models = self._model_objects()
        name = request.match_info["model"]
        if name not in models:
            raise UnknownModel(name, models)
        return web.json_response(models[name])

    def _model_objects(self) -> dict[str, dict[str, Any]]:
        served = self._frontend.served_models()
        models = model_objects(served, self._frontend.models, self._settings.engine_routes)
        return named_objects(models, self._frontend.choices.rules)

    async def passed_on(self, request: web.Request, body: _Body) -> web.StreamResponse:
        """Passes a request of another route on to an engine, chosen by load."""
        is_json = request.content_type != _FORM_TYPE
        if self._frontend.access is not None and not is_json:
            raise BadRequest("expected JSON: the fields of a form are not checked", advice="Send JSON.")
        return await self._forwarded(request, body, self._refused, request.path, is_json=is_json)

    async def _refused(self, request: web.Request, body: _Body) -> web.StreamResponse:  # noqa: ARG002
        """Refuses a request of another route, which only engines serve."""
        raise BadRequest(
            f"{request.path}: expected a model whose workers all have an OpenAI API of their own",
            field="model",
            advice="GET /v1/models says what each model serves.",
        )

    async def chat_completions(self, request: web.Request, body: _Body) -> web.StreamResponse:
        """Runs a chat and returns it as one response or as server-sent events."""
        self._check_text(len(body))
        chat = await self._work.read(parse_chat, body)
        add_headers(chat.fields, request, self._conversations)
        return await self._run_text(request, chat)

    def _forwarding(self, handler: _BodyHandler, path: str, api: type[TranslatedRequest] | None = None) -> _BodyHandler:
        """Returns a handler forwarding requests of a path; ``handler`` runs those that engines' own APIs do not get."""
        return lambda request, body: self._forwarded(request, body, handler, path, api)

    def _translating(self, kind: type[TranslatedRequest]) -> _BodyHandler:
        """Returns a handler running requests of another API as chats, as one response or as events."""

        async def handle(request: web.Request, body: _Body) -> web.StreamResponse:
            self._check_text(len(body))

            def read(body: _Body) -> tuple[TranslatedRequest, TextRequest]:
                translated = kind.read(body)
                return translated, translated.to_text_request(len(body))

            translated, chat = await self._work.read(read, body)
            try:
                add_headers(chat.fields, request, self._conversations)
                return await self._run_text(request, chat, translated)
            except KvRouterError as error:
                translated.rename(error)
                raise

        return self._forwarding(handle, kind.path, kind)

    async def count_tokens(self, request: web.Request, body: _Body) -> web.StreamResponse:
        """Returns the number of tokens a message's prompt has. An engine counts them if there is no tokenizer here."""
        models = self._frontend.models
        # With API keys, fields must be checked before a request is forwarded, and only generating routes have a check.
        if models.may_forward and self._frontend.access is None:
            name = (await self._work.read(NamedModel.read, body)).model
            model = chosen_model(name)
            is_passed = not models.has_text(model) and serves_itself(
                None, COUNT_TOKENS, models.resolve(model).forwarding
            )
            if is_passed:
                # Counting takes no prefill, whatever the prompt.
                routed = RoutedBody.on_load(name)
                return await self._forwarded(request, body, self._counted, COUNT_TOKENS, routed=routed)
        return await self._counted(request, body)

    async def _counted(self, request: web.Request, body: _Body) -> web.StreamResponse:  # noqa: ARG002
        """Counts the tokens of a message's prompt here."""
        models, limits = self._frontend.models, self._frontend.runner.limits
        self._check_text(len(body))
        chat = (await self._work.read(MessagesRequest.counted, body)).chat
        model = chosen_model(chat["model"])
        # Only engines with an OpenAI API take images.
        media = PromptMedia() if models.resolve(model).forwarding else None
        tokens = await count_tokens(models, limits, model, chat_prompt(chat, len(body), media))
        return web.json_response({"input_tokens": tokens})

    async def set_busy_threshold(self, request: web.Request, body: _Body) -> web.Response:  # noqa: ARG002
        """Sets the given thresholds of a model and returns those in force."""
        requested = BusyThresholdBody.parse(body).to_request()
        in_force = await self._frontend.set_busy_threshold(requested, deadline=Deadline.after(_ADMIN_SECONDS))
        return web.json_response(shown(requested.model, in_force))

    async def list_busy_thresholds(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Lists the thresholds of all models with one."""
        thresholds = await self._frontend.busy_thresholds(deadline=Deadline.after(_ADMIN_SECONDS))
        return web.json_response(listed(thresholds))

    async def completions(self, request: web.Request, body: _Body) -> web.StreamResponse:
        """Runs a completion and returns it as one response or as server-sent events."""
        chosen, size = chosen_model(""), len(body)

        def check_text(model: str) -> None:
            """Checks whether the model has a tokenizer, and whether a text of this size may be tokenized."""
            self._frontend.models.text_of(chosen or model, "prompt")
            self._check_text(size)

        limit = self._frontend.runner.limits.max_prompt_tokens
        completion = await self._work.read(
            lambda body: parse_completion(body, max_prompt_tokens=limit, check_text=check_text), body
        )
        fields = completion.fields
        add_headers(fields, request, self._conversations)
        prompt = completion.plain_prompt
        if prompt is None or self._frontend.models.has_text(fields.model):
            return await self._run_text(request, completion)
        frame = ResponseFrame(completion, None, [prompt.token_ids])
        generate = completion.generate_request(completion.max_tokens or 0)
        if fields.stream:
            return await self._stream(request, frame, generate)
        whole = WholeCompletion(frame)
        await self._frontend.runner.run(generate, prompt.token_ids, whole)
        return JsonResponse(request, whole.body(), frame.headers | cross_origin_headers(request))

    def _check_text(self, size: int) -> None:
        if size > self._max_text_bytes:
            raise BodyTooLarge(
                f"the body exceeds {self._max_text_bytes} bytes, {_MAX_TOKEN_BYTES} for each token of a prompt",
                field="prompt",
                advice="Send a shorter prompt.",
            )

    async def _forwarded(
        self,
        request: web.Request,
        body: _Body,
        otherwise: _BodyHandler,
        path: str,
        api: type[TranslatedRequest] | None = None,
        *,
        is_json: bool = True,
        routed: RoutedBody | None = None,
    ) -> web.StreamResponse:
        """Forwards a request to a worker with an OpenAI API of its own; ``otherwise`` runs it if its model's have none.

        ``path`` is that of the request: to read it from the URL takes microseconds. A request of another ``api`` than
        OpenAI's chats is translated to a chat if the engines do not serve the API. ``routed`` are the fields that
        decide where it goes; None to read them from the body.
        """
        models, access = self._frontend.models, self._frontend.access
        if not models.may_forward or self._engines is None:
            return await otherwise(request, body)
        limit = self._frontend.runner.limits.max_prompt_tokens
        read = request.pop(_ROUTED, None) if self._frontend.choices.rules else None
        routed = routed or read
        if routed is None:
            routed = await RoutedBody.read(body, self._work, path, max_prompt_tokens=limit, is_json=is_json)
        name = routed.model
        model = chosen_model(name)
        pools = models.resolve(model).forwarding
        if not pools:
            return await otherwise(request, body)
        view = pools[0]
        conversation = conversation_of(request, self._conversations, routed.conversation_id, routed.prompt_cache_key)
        routed.choose(model, request.headers, conversation)
        sent, translated = body, None
        if api is not None and not serves_itself(access, api.path, pools):
            as_chat = partial(routed.as_chat, api=api, max_prompt_tokens=limit)
            routed, translated, sent = await self._work.read(as_chat, body)
        elif api is not None:
            await self._work.read(api.check_passed, body)
        if translated is None and model != name:
            sent = await self._work.read(partial(renamed, model=model), body)
        if access is not None:
            engine_path = path if translated is None else CHATS
            routed, sent = await permitted(access, routed, sent, engine_path, self._work)
            check_salted(access, routed, pools)
        await routed.tokenize(models.texts, view.model, max_prompt_tokens=limit)
        passed = bytes(sent)
        if self._settings.forward_token_ids:
            passed = await self._with_token_ids(routed, passed, pools)
        routed_on = routed.routed_on(view)
        response = (
            ForwardedResponse(request, self._writer, routed_on)
            if translated is None
            else TranslatedResponse(request, self._writer, routed_on, translated, routed.token_ids)
        )
        has_key, chats = access is not None, "" if translated is None else CHATS
        calls = EngineCalls(request, response, passed, self._engines, routed, path, has_key, chats)
        generate = generate_request(routed, checked_request_id(request), pools)
        run = self._frontend.runner.run
        try:
            await run(generate, routed.token_ids, response, through=calls)
            await response.end()
        except KvRouterError as error:
            if not response.has_begun:
                if (engine_error := calls.engine_error(error)) is None:
                    raise
                return with_retry_time(response.engine_error(engine_error), error)
            response.fail(error_body(error)[1])
        except Exception:
            if not response.has_begun:
                raise
            log.exception("http.request_failed", path=path)
            response.fail(INTERNAL)
        finally:
            response.close()
        assert response.stream is not None, "a request that an engine ran has a response"  # noqa: S101
        return response.stream

    async def _with_token_ids(self, routed: RoutedBody, body: bytes, pools: Sequence[ComponentView]) -> bytes:
        """Returns the body for an engine, with the token ids of its text if all engines of the model take them."""
        if not (routed.is_one_text and routed.is_tokenized):
            return body
        if any(worker.engine not in TAKE_TOKEN_IDS for view in pools for worker in view.workers.values()):
            return body
        return await self._work.read(partial(with_token_ids, token_ids=routed.token_ids), body)

    async def _run_text(
        self, request: web.Request, text_request: TextRequest, translated: TranslatedRequest | None = None
    ) -> web.StreamResponse:
        """Runs a chat or completion. ``translated`` is the request of another API that became the chat."""
        prepared = await prepare(self._frontend.models, self._frontend.runner.limits, text_request)
        frame = prepared.frame
        if not text_request.fields.stream:
            whole = WholeResponse(frame) if translated is None else translated.whole(frame)
            await run_all(self._frontend.runner, prepared, whole)
            return JsonResponse(request, whole.body(), frame.headers | cross_origin_headers(request))
        events = EventStream(request, self._writer)
        stream = (
            StreamedResponse(frame, events) if translated is None else translated.streamed(frame, events, keeps=True)
        )
        return await _streamed(request, events, stream, lambda: run_all(self._frontend.runner, prepared, stream))

    async def _stream(
        self, request: web.Request, frame: ResponseFrame, generate: GenerateRequest
    ) -> web.StreamResponse:
        events = EventStream(request, self._writer)
        stream = CompletionStream(frame, events)
        return await _streamed(
            request, events, stream, lambda: self._frontend.runner.run(generate, frame.prompts[0], stream)
        )


async def _streamed(
    request: web.Request,
    events: EventStream,
    stream: CompletionStream | StreamedResponse | NamedEvents,
    run: Callable[[], Awaitable[None]],
) -> EventStream:
    """Runs a request whose output is streamed. An error after the first event is an event."""
    events.add_headers(cross_origin_headers(request))
    try:
        await run()
        await stream.end()
    except KvRouterError as error:
        if not events.begun:
            raise
        stream.fail(error_body(error)[1])
    except Exception:
        if not events.begun:
            raise
        log.exception("http.request_failed", path=request.path)
        stream.fail(INTERNAL)
    finally:
        stream.close()
    return events
