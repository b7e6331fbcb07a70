"""Adds text to the output of a request over gRPC, and ends it at a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from kvrouter.frontend.request.output_receiver import OutputComplete, OutputReceiver
from kvrouter.frontend.text.detokenizer import Detokenizer
from kvrouter.frontend.text.stop_strings import StopStrings
from kvrouter.frontend.workers.output import DetailedOutput, Output
from kvrouter.v1.frontend_pb2 import RoutingInfo
from kvrouter.v1.worker_pb2 import FinishReason, WorkerServiceGenerateResponse


class TextOutput:
    """An OutputReceiver that passes each piece on with its text."""

    def __init__(
        self, receiver: OutputReceiver, detokenizer: Detokenizer, stop: Sequence[str], *, min_tokens: int
    ) -> None:
        self._receiver = receiver
        self._detokenizer = detokenizer
        self._stop = StopStrings(stop)
        self._min_tokens = min_tokens
        self._tokens = 0

    def routed(self, routing: RoutingInfo) -> None:
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
