"""The gRPC server of a worker: WorkerService over an engine, with health and reflection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from kvrouter.net import trace_context
from kvrouter.net.auth import CallerCheck, ServiceToken
from kvrouter.net.calls import ServerCall
from kvrouter.net.http2 import ReceivedCall
from kvrouter.net.logs import get_logger
from kvrouter.net.model_files import PIECE_BYTES, InvalidModelFiles, describe_files, model_directory, read_model_files
from kvrouter.net.rpc.loop_server import BindFailed
from kvrouter.net.rpc.server import GrpcServer, received_trace_context
from kvrouter.net.tls import Tls
from kvrouter.publisher.config import WorkerConfig
from kvrouter.publisher.errors import EventsGone, InvalidConfig, RequestRefused
from kvrouter.publisher.publishing.rank_publisher import RankPublisher
from kvrouter.publisher.serving.engine import Engine, StepEngine
from kvrouter.publisher.serving.outputs import RequestOutput
from kvrouter.publisher.serving.requests import GenerateCall, OutputCall, RunningRequests
from kvrouter.v1 import worker_pb2 as pb
from kvrouter.v1.error_encoding import set_error
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.errors_pb2 import ErrorReason
from kvrouter.v1.message_limits import DEFAULT_LIMITS, InvalidMessage
from kvrouter.v1.registry_pb2 import ModelFile

if TYPE_CHECKING:
    from kvrouter.publisher.serving.request_spans import RequestSpans

log = get_logger(__name__)


class ModelFiles:
    """Files of one model. They are read again for each Frontend, and never kept in memory."""

    def __init__(self, directory: Path = Path(), described: Sequence[ModelFile] = ()) -> None:
        """Serves the described files of a directory; by default none."""
        self.described = described
        """The files as registered."""
        self._paths = {file.sha256: directory / file.name for file in described}

    @classmethod
    async def of(cls, config: WorkerConfig) -> ModelFiles:
        """Returns the files of ``config.tokenizer``; none if this machine has no usable ones."""
        if not config.tokenizer:
            return cls()
        directory = await asyncio.to_thread(model_directory, config.tokenizer)
        if directory is None:
            log.warning(
                "model_files.missing",
                tokenizer=config.tokenizer,
                consequence="prompts of text are routed on their length only, and their caches are not found",
                advice=f"give a Frontend --tokenizers {config.model}=DIRECTORY, or download the model's files here",
            )
            return cls()
        try:
            described = await asyncio.to_thread(lambda: describe_files(read_model_files(directory)))
        except InvalidModelFiles as error:
            log.warning("model_files.invalid", error=str(error), consequence="Frontends take no text for this model")
            return cls()
        log.info("model_files.served", component=str(config.component), files=[file.name for file in described])
        return cls(directory, described)

    def pieces(self, sha256: bytes) -> Iterator[bytes]:
        """Yields the content of a file. Blocks.

        Raises:
            KeyError: the worker has no such file.
            OSError: the file cannot be read any more.
        """
        with self._paths[sha256].open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece


SERVICE = pb.DESCRIPTOR.services_by_name["WorkerService"].full_name
"""Full name of the service, for health and reflection."""

_M = TypeVar("_M", bound=Message)
_Handler = Callable[[bytes, ReceivedCall], Awaitable[Message | None]]


@dataclass(eq=False)
class WorkerServer:
    """Serves an engine and the state of its ranks."""

    engine: StepEngine | Engine
    ranks: Mapping[int, RankPublisher]
    load: Callable[[], pb.GetLoadResponse]
    tls: Tls | None = None
    token: ServiceToken | None = None
    files: ModelFiles = field(default_factory=ModelFiles)
    """Those of the model's tokenizer."""
    _: KW_ONLY
    structured_output: bool = False
    spans: RequestSpans | None = None
    """Records requests; None records none."""

    def __post_init__(self) -> None:
        self._requests = RunningRequests(self.engine, structured_output=self.structured_output)
        self._draining = False
        self.callers = CallerCheck(self.tls, self.token)
        """Decides which processes may call the worker."""
        self.grpc = GrpcServer(self.callers if self.callers.applies else None, tls=self.tls)
        """Serves the calls."""
        self._draining_streams: asyncio.Task[None] | None = None

    @property
    def requests(self) -> int:
        """Number of running requests."""
        return len(self._requests)

    def emit(self, outputs: Iterable[RequestOutput]) -> None:
        """Passes the outputs of one engine step to their callers; see ``Worker.emit``."""
        self._requests.emit(outputs)

    async def start(self, bind: str) -> int:
        """Listens on ``host:port`` and returns the port.

        Raises:
            InvalidConfig: the port is in use or the address is not one of this machine's.
        """
        handlers: dict[str, Any] = {
            "Generate": grpc.unary_stream_rpc_method_handler(self._guarded(self._generate)),
            "Abort": grpc.unary_unary_rpc_method_handler(self._guarded(self._abort), response_serializer=_encode),
            "GetRankState": grpc.unary_stream_rpc_method_handler(self._guarded(self._get_rank_state)),
            "GetEvents": grpc.unary_stream_rpc_method_handler(self._guarded(self._get_events)),
            "GetLoad": grpc.unary_unary_rpc_method_handler(self._guarded(self._get_load), response_serializer=_encode),
            "GetModelFile": grpc.unary_stream_rpc_method_handler(self._guarded(self._get_model_file)),
        }
        self.grpc.add(SERVICE, handlers)
        self.grpc.call_streams.add_streaming(f"{SERVICE}/Generate", self._generate_on_stream)
        self.grpc.call_streams.add_unary(f"{SERVICE}/Abort", self._abort_on_stream)
        self._requests.attach()
        try:
            port = await self.grpc.start(bind)
        except BindFailed as error:
            raise InvalidConfig(f"bind: {error}") from None
        for name in ("", SERVICE):
            self.grpc.health.set(name, True)
        return port

    async def refuse_requests(self) -> None:
        """Refuses new requests from now on and reports that in grpc.health; running calls continue."""
        self._draining = True
        self._draining_streams = asyncio.create_task(self.grpc.call_streams.drain())
        for name in ("", SERVICE):
            self.grpc.health.set(name, False)

    async def stop(self, grace_seconds: float) -> None:
        """Waits for running calls, cancels them after ``grace_seconds``, and stops listening."""
        await self.grpc.stop(grace_seconds)
        await self._requests.close()
        if self._draining_streams is not None:
            self._draining_streams.cancel()
            await asyncio.wait({self._draining_streams})

    async def _generate(self, data: bytes, context: ReceivedCall) -> None:
        call = GenerateCall()
        with trace_context.entered(received_trace_context(context)):
            self._start(data, call)
        del data
        try:
            # Not yielded: gRPC does not close a generator at once when the caller disconnects.
            await call.write_to(context.write)
        finally:
            call.cancel()

    def _generate_on_stream(self, data: bytes, call: ServerCall) -> None:
        with trace_context.entered(trace_context.checked(call.trace_context)):
            self._start(data, call)

    async def _abort_on_stream(self, data: bytes, call: ServerCall) -> bytes:
        return (await self._abort(data, call)).SerializeToString()

    def _start(self, data: bytes, call: OutputCall) -> None:
        request = _parse(pb.WorkerServiceGenerateRequest, data)
        if self._draining:
            raise RequestRefused(
                "the worker is stopping",
                code=grpc.StatusCode.UNAVAILABLE,
                reason=ErrorReason.ERROR_REASON_DRAINING,
                advice="Use another worker.",
                retry_elsewhere=True,
            )
        self._rank(request.dp_rank)
        if not request.token_ids:
            raise RequestRefused("the prompt is empty", field="token_ids", advice="Send at least one token id.")
        if not request.stop_conditions.max_tokens:
            raise RequestRefused(
                "max_tokens is 0", field="stop_conditions.max_tokens", advice="Set max_tokens to 1 or more."
            )
        if not (request.tracestate or request.baggage):
            self._run(request, call)
            return
        companions = trace_context.checked_companions(trace_context.current(), [request.tracestate], [request.baggage])
        with trace_context.accompanied(companions):
            self._run(request, call)

    def _run(self, request: pb.WorkerServiceGenerateRequest, call: OutputCall) -> None:
        traced = None if self.spans is None else self.spans.begin(request, call)
        if traced is None:
            self._requests.start(request, call)
            return
        with traced.starting():
            self._requests.start(request, traced)

    async def _abort(self, data: bytes, _: ReceivedCall | ServerCall) -> pb.AbortResponse:
        request = _parse(pb.AbortRequest, data)
        return pb.AbortResponse(aborted=await self._requests.abort(list(request.request_ids)))

    async def _get_rank_state(self, data: bytes, context: ReceivedCall) -> None:
        rank = self._rank(_parse(pb.GetRankStateRequest, data).dp_rank)
        await _write_all(_state_chunks(rank), context)

    async def _get_events(self, data: bytes, context: ReceivedCall) -> None:
        request = _parse(pb.GetEventsRequest, data)
        rank = self._rank(request.dp_rank)
        if rank.is_current(request.start):
            return  # Most comparisons find no event, for which a thread would cost more than all the rest.
        try:
            await _write_all(_event_responses(rank, request), context)
        except EventsGone as error:
            raise RequestRefused(
                str(error),
                code=grpc.StatusCode.OUT_OF_RANGE,
                reason=ErrorReason.ERROR_REASON_UNSPECIFIED,
                field="start",
                advice="Fetch the rank's state instead.",
            ) from None

    async def _get_load(self, data: bytes, _context: ReceivedCall) -> pb.GetLoadResponse:
        _parse(pb.GetLoadRequest, data)
        return self.load()

    async def _get_model_file(self, data: bytes, context: ReceivedCall) -> None:
        request = _parse(pb.GetModelFileRequest, data)
        pieces = self.files.pieces(request.sha256)
        try:
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                await context.write(pb.GetModelFileResponse(content=piece).SerializeToString())
        except (KeyError, OSError):
            raise RequestRefused(
                f"this worker has no model file {request.sha256.hex()[:64]} any more",
                code=grpc.StatusCode.NOT_FOUND,
                reason=ErrorReason.ERROR_REASON_UNSPECIFIED,
                field="sha256",
                advice="Ask for a file that the worker registers, or ask another worker.",
            ) from None

    def _rank(self, dp_rank: int) -> RankPublisher:
        rank = self.ranks.get(dp_rank)
        if rank is None:
            raise RequestRefused(
                f"this worker has no rank {dp_rank}",
                code=grpc.StatusCode.NOT_FOUND,
                reason=ErrorReason.ERROR_REASON_UNKNOWN_WORKER,
                field="dp_rank",
                advice="Send one of its ranks.",
                known=sorted(self.ranks),
            )
        return rank

    def _guarded(self, handler: _Handler) -> _Handler:
        """Converts exceptions of a handler to a status: RequestRefused with its details, all others to INTERNAL."""

        async def guarded(data: bytes, context: ReceivedCall) -> Message | None:
            try:
                return await handler(data, context)
            except KvRouterError as refusal:
                set_error(context, refusal)
            except Exception:
                log.exception("call.failed", method=handler.__name__.removeprefix("_"))
                context.set_code(grpc.StatusCode.INTERNAL)
                context.set_details("the worker failed; its log has the cause")
            return None

        return guarded


def _encode(message: Message) -> bytes:
    return message.SerializeToString()


def _state_chunks(rank: RankPublisher) -> Iterator[pb.GetRankStateResponse]:
    # The snapshot too is taken in the thread that asks for the first chunk.
    yield from rank.state_chunks()


def _event_responses(rank: RankPublisher, request: pb.GetEventsRequest) -> Iterator[pb.GetEventsResponse]:
    for batch in rank.events(request.start, request.until_event_id):
        yield pb.GetEventsResponse(batch=batch)


async def _write_all(messages: Iterator[Message], context: ReceivedCall) -> None:
    # Made in a thread: encoding a large rank on the loop would delay the output of other requests.
    while (encoded := await asyncio.to_thread(_next_encoded, messages)) is not None:
        # Waits until the client reads it, so that a slow client does not make the worker buffer the whole response.
        await context.write(encoded)


def _next_encoded(messages: Iterator[Message]) -> bytes | None:
    message = next(messages, None)
    return None if message is None else message.SerializeToString()


def _parse(kind: type[_M], data: bytes) -> _M:
    try:
        DEFAULT_LIMITS.check(data, kind)
        return kind.FromString(data)
    except InvalidMessage as error:
        raise RequestRefused(str(error), field=error.field, advice=error.advice) from None
    except DecodeError:
        raise RequestRefused(f"expected an encoded {kind.DESCRIPTOR.name}") from None
