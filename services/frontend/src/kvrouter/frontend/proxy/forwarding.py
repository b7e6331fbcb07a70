"""Forwards requests to workers with an OpenAI API of their own, with the body unchanged and the response as it is.

The request is booked, retried and accounted for as any other. The bytes of its worker go to the client unchanged, and
each event of a stream counts as a token. Such a request is retried until the client gets the first byte; a whole
response of up to 1 MiB is sent when it is complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from http import HTTPStatus
from typing import NamedTuple

import aiohttp
import msgspec
from aiohttp import web
from kvrouter.engines.fields import HARMLESS_HEADERS, quotes_internal, shown_failure
from kvrouter.engines.openai_server import is_alive, is_openai_server
from kvrouter.frontend.edge.event_stream import STREAM_TYPE
from kvrouter.frontend.edge.frame import KV_SOURCE_HEADER, kv_source_text
from kvrouter.frontend.edge.request_fields import RANK_HEADER
from kvrouter.frontend.generate_request import DEFAULT_SAMPLING, GenerateRequest, Sampling, StopRules
from kvrouter.frontend.proxy.engine_connections import EngineConnections
from kvrouter.frontend.proxy.engine_exchange import EngineAnswer, EngineFailed, Offer
from kvrouter.frontend.proxy.engine_request import (
    can_share,
    decode_body,
    engine_request_id,
    prefill_body,
    transfer_params,
)
from kvrouter.frontend.proxy.engine_response import EngineResponse, count_tokens
from kvrouter.frontend.proxy.forwarded_response import ForwardedResponse
from kvrouter.frontend.proxy.routed_body import RoutedBody
from kvrouter.frontend.request.current_choice import falls_back
from kvrouter.frontend.request.gen_ai import operation_of
from kvrouter.frontend.request.request_runner import RequestRunner
from kvrouter.frontend.request.served_models import Engine
from kvrouter.frontend.workers.attempt import Dispatch, WorkerAttempt
from kvrouter.frontend.workers.failures import RETRY_AFTER_MS
from kvrouter.frontend.workers.health import WorkerHealth
from kvrouter.frontend.workers.output import DetailedOutput, Output
from kvrouter.net import trace_context
from kvrouter.net.calls import OutcomeUnknown
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.v1.common_pb2 import BlockScope, RoutingConstraints, Stage
from kvrouter.v1.errors import AllBusy, DependencyAway, KvRouterError, WorkerLost
from kvrouter.v1.registry_pb2 import WorkerRegistration
from kvrouter.v1.worker_pb2 import FinishReason
from multidict import CIMultiDict, MultiMapping

_NOT_FORWARDED = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "upgrade"),
        *("transfer-encoding", "host", "content-length", "content-encoding", "expect", RANK_HEADER),
        KV_SOURCE_HEADER,
        *trace_context.HEADERS,
    }
)
_NOT_RETURNED = frozenset({"connection", "keep-alive", "transfer-encoding", "upgrade", "trailer", "date", "server"})
_NOT_RETURNED_REWRITTEN = _NOT_RETURNED | {"content-length"}
"""Headers which a response loses if fields are removed from it."""
_ENCODING = frozenset({"accept-encoding"})
# Reading one from its enum takes over a microsecond.
_PREFILL, _STOP = Stage.STAGE_PREFILL, FinishReason.FINISH_REASON_STOP
_KEPT_OF_ERRORS = ("Content-Type", "Content-Encoding", "Retry-After")
"""Headers an engine's error keeps, if no engine serves the request."""
_JSON_TYPE = "application/json"
_FIRST_ERROR, _BUSY_STATUS = 400, 429
_UNLIMITED_TOKENS = (1 << 32) - 1
_MAX_WHOLE_BYTES = 1 << 20
"""Size up to which a response that is no stream is kept until it is complete, so another engine can give it."""
_MOST_COUNTED = 1 << 20
"""Maximum number of output tokens a usage may report."""
_MAX_PREFILL_BYTES = 16 << 20
"""Maximum size of the response of a prefill engine."""
_MAX_FAILURE_BYTES = 64 << 10
"""Maximum size of an engine's error, bytes."""


def generate_request(body: RoutedBody, request_id: str, pools: Sequence[ComponentView] = ()) -> GenerateRequest:
    """Returns a forwarded request, without the prompt.

    Args:
        body: The request as routing needs it.
        request_id: Its id.
        pools: Components of its model, whose workers are excluded that may not run it.
    """
    request = GenerateRequest(
        model=body.model,
        stop=StopRules(max_tokens=body.max_output_tokens),
        request_id=request_id,
        priority=body.priority,
        conversation_id=body.conversation_id,
        sampling=Sampling(n=body.sequences) if body.sequences > 1 else DEFAULT_SAMPLING,
        scope=BlockScope(cache_salt=body.cache_salt) if body.cache_salt else None,
        multimodal_hashes=body.media.hashes if body.media else (),
    )
    if body.dp_rank is not None or body.salted_path:
        excluded = (worker for view in pools for worker in view.workers.values() if not body.may_run_at(worker))
        request.constraints = RoutingConstraints(
            dp_rank=body.dp_rank,
            excluded_worker_ids={worker.worker_id for worker in excluded} if body.salted_path else None,
        )
    return request


class Engines(NamedTuple):
    """The access to engines, shared by all requests."""

    connections: EngineConnections
    """Connections to their OpenAI APIs."""
    session: aiohttp.ClientSession
    """Connections to see whether one lives."""
    runner: RequestRunner
    """Has the workers, the models, the options and the callers' access."""


class EngineCalls(msgspec.Struct, eq=False, dict=True):
    """The calls of one request to engines, in the place of a WorkerClient. Their output goes to a ForwardedResponse."""

    _request: web.Request
    """The client's request."""
    _response: ForwardedResponse
    _body: bytes
    _engines: Engines
    _routed: RoutedBody
    """The parts of the body that routing needs."""
    _route: str
    """Path of the client's request."""
    _is_authenticated: bool = False
    """Whether the client has a key, so it neither sets nor sees internal fields of engines."""
    _engine_path: str = ""
    """Path of the engine's API, whose responses are translated; empty for the client's own."""
    counted_prompt_tokens: int | None = None
    """Tokens of its prompt as the engine counted them; None until it reports them."""
    _engine_error: web.Response | None = None
    """The error of the engine called last; None if it gave none the client may see."""

    def __repr__(self) -> str:
        """Returns the path only, without the body."""
        return f"EngineCalls({self._route!r})"

    @property
    def operation(self) -> str:
        """Its operation, in the words of the GenAI conventions."""
        return operation_of(self._route)

    @property
    def health(self) -> WorkerHealth:
        """The health of the workers."""
        return self._engines.runner.workers.health

    @property
    def is_estimated(self) -> bool:
        """Whether the length of its prompt is an estimate."""
        return self._routed.is_estimated

    @property
    def sequences(self) -> int:
        """Number of sequences the engine computes."""
        return self._routed.sequences

    @cached_property
    def _can_share(self) -> bool:
        return can_share(self._body)

    def can_prefill(self, worker: WorkerRegistration) -> bool:
        """Returns whether a prefill worker has an OpenAI API, and the request can be shared with it."""
        return self._can_share and bool(worker.openai_endpoint) and self._routed.may_run_at(worker)

    def engine_error(self, error: KvRouterError) -> web.Response | None:
        """Returns the response of the engine that caused the error of this request; None if none did.

        It is also None if another model serves the request.
        """
        if self._engine_error is None or falls_back(error) or not isinstance(error, AllBusy | WorkerLost):
            return None
        self._engine_error.headers.update(self._response.headers)
        return self._engine_error

    def start(self, dispatch: Dispatch) -> WorkerAttempt:
        """Starts an attempt at a worker, as ``WorkerClient.start``. The body has the prompt."""
        self._engine_error = None
        request, endpoint, runner = dispatch.request, dispatch.endpoint, self._engines.runner
        is_prefill = request.stage == _PREFILL
        shows_progress = is_prefill or self._routed.is_stream
        health = runner.workers.health.begin(endpoint, dispatch.prompt_tokens if shows_progress else None)
        attempt = WorkerAttempt(dispatch, health, runner.workers.metrics, max_tokens=_UNLIMITED_TOKENS)
        engine = runner.models.engine_at(endpoint, dispatch.worker_id)
        body = (prefill_body if is_prefill else decode_body)(self._body, request.transfer_params)
        read = self._read_prefill if is_prefill else self._pass_on
        loop = asyncio.get_running_loop()
        attempt.start(lambda receiver: loop.create_task(self._call(engine, dispatch, body, read, receiver)))
        return attempt

    async def answers(self, endpoint: str) -> bool:
        """Returns whether a worker is registered and answers a probe soon."""
        engine = self._engines.runner.models.engine_at(endpoint)
        if engine is not None and is_openai_server(engine.worker):
            return True  # A listed server is registered while it answers.
        return await self._engines.runner.workers.answers(endpoint)

    async def is_reachable(self, endpoint: str) -> bool:
        """Returns False if a worker refuses connections now. Costs nothing if there is one already."""
        engine = self._engines.runner.models.engine_at(endpoint)
        if engine is None or is_openai_server(engine.worker):
            return engine is not None  # A listed server is registered while it answers.
        return await self._engines.runner.workers.is_reachable(endpoint)

    async def abort(self, endpoint: str, request_id: str) -> bool:  # noqa: ARG002 - nobody is called
        """Returns True: an engine aborts a request whose connection is closed."""
        return True

    async def _call(
        self,
        engine: Engine | None,
        dispatch: Dispatch,
        body: bytes,
        read: Callable[[EngineAnswer, WorkerAttempt], Awaitable[None]],
        receiver: WorkerAttempt,
    ) -> None:
        if engine is None or not (url := engine.url):
            receiver.on_error(DependencyAway(f"worker {dispatch.worker_id} has no OpenAI API any more"))
            return
        if self._routed.salted_path and not self._routed.may_run_at(engine.worker):
            receiver.on_error(DependencyAway(f"worker {dispatch.worker_id} does not separate caches by salt"))
            return
        headers = self._headers(dispatch.request.request_id)
        if key := self._engines.runner.settings.engine_keys.headers(engine.component):
            headers.update(key)
        if engine.has_ranks:
            headers[RANK_HEADER] = str(dispatch.request.dp_rank)
        if (source := dispatch.request.kv_source) is not None:
            headers[KV_SOURCE_HEADER] = kv_source_text(source)
        path = self._engine_path or self._route
        if path != self._request.raw_path and not (self._engine_path or self._is_authenticated):
            path = self._request.rel_url.raw_path_qs  # It has a query.
        seconds = dispatch.deadline.remaining()
        answer: EngineAnswer | None = None
        try:
            answer = await self._engines.connections.post(url, path, data=body, headers=headers, seconds=seconds)
            if answer.status >= _FIRST_ERROR:
                await self._check(answer, path, has_key=bool(key))
            if (self._is_authenticated or self._engine_path) and "Content-Encoding" in answer.headers:
                raise DependencyAway("its OpenAI API compresses a response although nobody accepts that")
            await read(answer, receiver)
        except EngineFailed as error:
            # Engines that live end connections too, such as an idle one that a request has just taken.
            lives = await is_alive(self._engines.session, url)
            receiver.on_error(DependencyAway(str(error)) if lives else OutcomeUnknown(str(error)))
        except ConnectionError:
            return  # The client has left; aiohttp cancels its handler.
        except Exception as error:
            receiver.on_error(error)
        finally:
            if answer is not None:
                self._engines.connections.end(answer)

    async def _check(self, answer: EngineAnswer, path: str, *, has_key: bool) -> None:
        """Raises the error of a response which is not for the client."""
        if answer.status == _BUSY_STATUS or answer.status >= 500:
            raise await self._refusal(answer)
        if answer.status == HTTPStatus.UNAUTHORIZED and (has_key or self._is_authenticated):
            # The credential that it refuses is not the client's.
            raise DependencyAway("its OpenAI API refuses the Frontend: expected its key in --engine-keys-file")
        if answer.status == HTTPStatus.NOT_FOUND and answer.headers.get("Content-Length") == "0":
            raise DependencyAway(f"its server answers an empty 404 to {path}: check the URL of its OpenAI API")

    def _headers(self, request_id: str) -> CIMultiDict[str]:
        """Returns the client's headers for an engine."""
        if self._is_authenticated:
            named = self._request.headers.items()
            headers = CIMultiDict((name, value) for name, value in named if name.lower() in HARMLESS_HEADERS)
            if engine_id := engine_request_id(request_id):
                headers["x-request-id"] = engine_id
        else:
            headers = _without(self._request.headers, _NOT_FORWARDED)
        if self._is_authenticated or self._engine_path:
            headers = _without(headers, _ENCODING)  # A compressed response could not be read.
        headers.update(trace_context.headers())
        return headers

    def _shown(self, failure: str) -> str:
        return shown_failure(failure) if self._is_authenticated else failure

    async def _refusal(self, answer: EngineAnswer) -> AllBusy | DependencyAway | EngineFailed:
        """Returns the error for a response with which an engine says that another one may serve the request."""
        body = await answer.read(_MAX_FAILURE_BYTES)
        message = f"its OpenAI API answers {answer.status}: {self._shown(body.decode(errors='replace'))[:256]}"
        is_whole = answer.content_type == _JSON_TYPE and answer.is_read
        if is_whole and not (self._is_authenticated and quotes_internal(body)):
            headers = {name: answer.headers[name] for name in _KEPT_OF_ERRORS if name in answer.headers}
            self._engine_error = web.Response(status=answer.status, body=body, headers=headers)
        if answer.status == _BUSY_STATUS:
            return AllBusy(RETRY_AFTER_MS, message)
        # One that answers 503 has not begun with the request.
        return DependencyAway(message) if answer.status == HTTPStatus.SERVICE_UNAVAILABLE else EngineFailed(message)

    async def _read_prefill(self, answer: EngineAnswer, receiver: WorkerAttempt) -> None:
        """Reads the response of a prefill engine, which the client does not get."""
        body = await answer.read(_MAX_PREFILL_BYTES + 1)
        if len(body) > _MAX_PREFILL_BYTES:
            raise DependencyAway(f"its OpenAI API answers a prefill with more than {_MAX_PREFILL_BYTES} bytes")
        if answer.status != HTTPStatus.OK:
            failure = self._shown(body.decode(errors="replace"))
            raise DependencyAway(f"its OpenAI API answers {answer.status}: {failure[:256]}")
        params = transfer_params(body)
        receiver.take(DetailedOutput(1, finish_reason=FinishReason.FINISH_REASON_LENGTH, transfer_params=params))
        receiver.on_end()

    async def _pass_on(self, answer: EngineAnswer, receiver: WorkerAttempt) -> None:
        """Passes on the response of the engine generating the output."""
        is_stream = answer.content_type == STREAM_TYPE
        response = EngineResponse(is_stream=is_stream, status=answer.status, hides_internal=self._is_authenticated)
        headers = _without(answer.headers, _NOT_RETURNED_REWRITTEN if self._is_authenticated else _NOT_RETURNED)
        self._response.answers(answer.status, answer.reason, headers)
        pass_on = self._pass_stream if is_stream else self._pass_whole
        last = await pass_on(answer, receiver, response)
        last.finish_reason = _STOP
        usage = response.usage()
        if not is_stream:
            generated = 1 if usage is None else usage.completion_tokens or 1
            last.tokens += min(max(1, generated), _MOST_COUNTED)
        if usage is not None:
            last.cached_tokens = usage.cached_tokens
            self.counted_prompt_tokens = usage.prompt_tokens
            self._routed.counted(usage.prompt_tokens)
        receiver.take(last)
        receiver.on_end()

    async def _pass_stream(
        self, answer: EngineAnswer, receiver: WorkerAttempt, response: EngineResponse
    ) -> DetailedOutput:
        def take(part: bytes) -> Offer | None:
            receiver.take(Output(count_tokens(part), (), response.take(part)))
            return offer if receiver.has_writer and not response.is_holding else None

        def offer_shown(chunks: bytes) -> bool:
            return not quotes_internal(chunks) and receiver.offer(chunks)

        offer = offer_shown if self._is_authenticated else receiver.offer
        await answer.pass_on(take, self._response.stream)
        return DetailedOutput(raw=response.take(b"", ends=True))

    async def _pass_whole(
        self, answer: EngineAnswer, receiver: WorkerAttempt, response: EngineResponse
    ) -> DetailedOutput:
        """Keeps a response until it is complete, or too long: until then another engine can give it.

        Returns the rest, of which the tokens counted before are to be subtracted.
        """
        kept, begun_tokens = bytearray(), 0
        while not answer.is_read:
            part = await answer.part()
            kept += response.take(part, ends=answer.is_read)
            if begun_tokens or len(kept) > _MAX_WHOLE_BYTES:
                receiver.take(DetailedOutput(0 if begun_tokens else 1, raw=bytes(kept)))
                begun_tokens = 1
                kept.clear()
                await self._response.drain()
        return DetailedOutput(-begun_tokens, raw=bytes(kept))


def _without(headers: MultiMapping[str], names: frozenset[str]) -> CIMultiDict[str]:
    """Returns headers but those of these names."""
    kept = CIMultiDict(headers)
    for name in names.intersection(map(str.lower, headers)):
        del kept[name]
    return kept
