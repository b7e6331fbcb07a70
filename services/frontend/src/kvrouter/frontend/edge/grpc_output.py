"""What gRPC clients get: the output of a request, buffered, with text and stop strings on request; and routing answers.

The public messages are others than the internal ones, so that the internal ones may change.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrouter.frontend.edge.event_stream import too_much_unread
from kvrouter.frontend.edge.text_request import TextPrompt
from kvrouter.frontend.request.progress import OutputComplete, OutputReceiver
from kvrouter.frontend.request.request_checks import Limits, prompt_limit
from kvrouter.frontend.request.routed import Routed
from kvrouter.frontend.request.served_models import ServedModels
from kvrouter.frontend.text.output_text import Detokenizer, StopStrings
from kvrouter.frontend.workers.output import DetailedOutput, Output
from kvrouter.net.calls.limits import BufferFull, ResponseBuffer
from kvrouter.v1.common_pb2 import Cursor, Rank
from kvrouter.v1.errors import BadRequest
from kvrouter.v1.frontend_pb2 import (
    FrontendServiceFindMatchesResponse,
    FrontendServiceGenerateRequest,
    FrontendServiceGenerateResponse,
    RankOverlap,
    Selection,
)
from kvrouter.v1.indexer_pb2 import FindMatchesResponse
from kvrouter.v1.scheduler_pb2 import SelectWorkerResponse
from kvrouter.v1.worker_pb2 import FinishReason, WorkerServiceGenerateResponse


def selection_of(response: SelectWorkerResponse) -> Selection:
    """Returns a Scheduler's choice."""
    return Selection(
        rank=response.rank,
        endpoint=response.endpoint,
        overlap_blocks=response.overlap_blocks,
        prompt_blocks=response.prompt_blocks,
        decision_id=response.decision_id,
        load_only=response.load_only,
        repeated=response.repeated,
        component=response.component if "component" in response else None,
        mode=response.mode,
        role=response.role,
        queued_us=response.queued_us,
        prefill_tokens=response.prefill_tokens if "prefill_tokens" in response else None,
        ignored_overrides=response.ignored_overrides,
        prefill=response.prefill if "prefill" in response else None,
    )


def overlaps_of(response: FindMatchesResponse) -> FrontendServiceFindMatchesResponse:
    """Returns what an Indexer says of each rank."""
    columns = zip(
        response.worker_ids,
        response.dp_ranks,
        response.device_blocks,
        response.host_blocks,
        response.disk_blocks,
        response.shared_blocks,
        response.incarnations,
        response.next_event_ids,
        response.partial,
        strict=True,
    )
    return FrontendServiceFindMatchesResponse(
        overlaps=(
            RankOverlap(
                rank=Rank(worker_id=worker_id, dp_rank=dp_rank),
                device_blocks=device,
                host_blocks=host,
                disk_blocks=disk,
                shared_blocks=shared,
                cursor=Cursor(incarnation=incarnation, next_event_id=next_event_id),
                partial=partial,
            )
            for worker_id, dp_rank, device, host, disk, shared, incarnation, next_event_id, partial in columns
        ),
        prompt_blocks=response.prompt_blocks,
    )


class OutputBuffer(ResponseBuffer):
    """An OutputReceiver whose output is taken as encoded FrontendServiceGenerateResponse messages."""

    def __init__(self) -> None:
        super().__init__()
        self._routing = b""
        self.begun = False
        """Whether there has been output."""

    def routed(self, routing: Routed) -> None:
        """Adds the routing to the next piece."""
        self._routing = FrontendServiceGenerateResponse(routing=routing.to_message()).SerializeToString()

    def output(self, output: Output) -> None:
        """Buffers a piece. Clients see no transfer parameters: they are for decode workers.

        Raises:
            TooLarge: the client has left too much output unread. All of it is dropped.
        """
        encoded = output.raw if output.transfer_params is None else output.without("transfer_params").raw
        self.begun = True
        if self._routing:
            encoded, self._routing = encoded + self._routing, b""
        try:
            self.append(encoded)
        except BufferFull as full:
            raise too_much_unread(full.unread_bytes) from None


class TextOutput:
    """An OutputReceiver passing each piece on with its text."""

    def __init__(
        self, receiver: OutputReceiver, detokenizer: Detokenizer, stop: Sequence[str], *, min_tokens: int
    ) -> None:
        self._receiver = receiver
        self._detokenizer = detokenizer
        self._stop = StopStrings(stop)
        self._min_tokens = min_tokens
        self._tokens = 0

    def routed(self, routing: Routed) -> None:
        """Adds where the request runs."""
        self._receiver.routed(routing)

    def output(self, output: Output) -> None:
        """Passes a piece on.

        Raises:
            OutputComplete: a stop string occurred.
        """
        piece = WorkerServiceGenerateResponse.FromString(output.raw).output
        self._tokens += output.tokens
        piece.text = self._detokenizer.feed(output.token_ids)
        if self._tokens > self._min_tokens:
            piece.text = self._stop.feed(piece.text)
        if self._stop.matched is not None:
            piece.finish_reason = FinishReason.FINISH_REASON_STOP
        elif piece.finish_reason:
            piece.text += self._stop.end()
        self._receiver.output(DetailedOutput.of(piece))
        if self._stop.matched is not None:
            raise OutputComplete


async def with_text(
    models: ServedModels, limits: Limits, request: FrontendServiceGenerateRequest, prompt: bytes, buffer: OutputBuffer
) -> tuple[bytes, OutputReceiver]:
    """Returns the prompt, tokenized if it is a text, and the receiver that adds text to the output if requested.

    Raises:
        UnknownModel: no component serves the model.
        NoWorkers: the model has no live worker, so nothing is known of its tokenizer.
        BadRequest: the model has no tokenizer here.
        PromptTooLong: the text has too many tokens.
        RateLimited, Overloaded: too much text waits for the tokenizer.
    """
    field = "prompt_text" if request.prompt_text else "return_text"
    text = models.text_of(request.model, field)
    if request.prompt_text:
        source = TextPrompt(request.prompt_text, add_special_tokens=True, field="prompt_text")
        with prompt_limit(models.pools(request.model, forwarding=False), limits) as limit:
            (prompt,) = await models.texts.tokens(text, [source], limit, salt=request.scope.cache_salt)
        request.ClearField("prompt_text")
    if not request.return_text:
        return prompt, buffer
    stop = list(request.stop_conditions.stop)
    request.stop_conditions.ClearField("stop")
    if not all(stop):
        raise BadRequest("a stop string is empty", field="stop_conditions.stop", advice="Leave it out.")
    minimum = request.stop_conditions.min_tokens
    return prompt, TextOutput(buffer, text.detokenizer(prompt), stop, min_tokens=minimum)
