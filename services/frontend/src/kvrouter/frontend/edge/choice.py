"""One sequence of a response: its tokens as text, its stop strings, and why it ended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from kvrouter.frontend.edge.frame import FINISH_REASONS, Piece, ResponseFrame
from kvrouter.frontend.request.progress import OutputComplete
from kvrouter.frontend.request.routed import Routed
from kvrouter.frontend.text.model_text import ModelText
from kvrouter.frontend.text.output_text import Detokenizer, ReasoningParser, StopStrings
from kvrouter.frontend.text.tool_calls import ToolCallPiece
from kvrouter.frontend.workers.output import Output
from kvrouter.v1.worker_pb2 import TopLogprobs


class ChoiceSink(Protocol):
    """Receives the pieces of all sequences of a response."""

    def routed(self, index: int, routing: Routed) -> None:
        """Receives where a sequence runs."""

    def add(self, index: int, piece: Piece) -> None:
        """Receives a piece of a sequence."""


class Collected:
    """The pieces of one sequence, collected to be one."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: list[ToolCallPiece] = []
        self._token_ids = array("I")
        self._logprobs = array("d")
        self._top_logprobs: list[TopLogprobs] = []
        self._finish_reason: str | None = None
        self._stop_reason: str | None = None

    def add(self, piece: Piece) -> None:
        """Adds a piece."""
        self._texts.append(piece.text)
        self._reasoning.append(piece.reasoning)
        self._tool_calls.extend(piece.tool_calls)
        self._token_ids.extend(piece.token_ids)
        self._logprobs.extend(piece.logprobs)
        self._top_logprobs.extend(piece.top_logprobs)
        self._finish_reason, self._stop_reason = piece.finish_reason, piece.stop_reason

    def whole(self) -> Piece:
        """Returns all pieces as one, with each tool call in one piece."""
        arguments: defaultdict[int, list[str]] = defaultdict(list)
        for call in self._tool_calls:
            arguments[call.index].append(call.arguments)
        return Piece(
            text="".join(self._texts),
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            top_logprobs=self._top_logprobs,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            tool_calls=[
                replace(call, arguments="".join(arguments[call.index])) for call in self._tool_calls if call.name
            ],
            reasoning="".join(self._reasoning),
        )


class WholeSink(ABC):
    """A ChoiceSink collecting all sequences for one response."""

    def __init__(self, frame: ResponseFrame) -> None:
        self._frame = frame
        self._sequences: dict[int, Collected] = {}

    def routed(self, index: int, routing: Routed) -> None:
        """Adds where a sequence runs. Its output so far stays when it continues on another worker."""
        self._frame.routed(index, routing)
        self._sequences.setdefault(index, Collected())

    def add(self, index: int, piece: Piece) -> None:
        """Adds a piece of a sequence."""
        self._sequences.setdefault(index, Collected()).add(piece)

    @abstractmethod
    def body(self) -> bytes:
        """Returns the response as JSON."""


class Choice:
    """An OutputReceiver turning the output of one sequence into text."""

    def __init__(self, index: int, frame: ResponseFrame, sink: ChoiceSink) -> None:
        request, text, prompt = frame.request, frame.text, frame.prompt_of(index)
        fields, tools = request.fields, request.tools
        self._parser = None if tools is None or text is None else tools.parser(text.tool_format)
        self._reasoning = _reasoning_parser(frame, index)
        self.index = index
        self._count = frame.counts[index]
        self._sink = sink
        self._detokenizer: Detokenizer | None = None
        if text is not None:
            skips_special = fields.skip_special_tokens is not False
            marks = self._marks(text)
            self._detokenizer = text.detokenizer(prompt, skip_special_tokens=skips_special, marks=marks)
        self._stop = StopStrings(fields.stop_strings(), include=bool(fields.include_stop_str_in_output))
        self._min_tokens = fields.min_tokens or 0

    def routed(self, routing: Routed) -> None:
        """Adds where the sequence runs."""
        self._sink.routed(self.index, routing)

    def output(self, output: Output) -> None:
        """Adds a piece of the output.

        Raises:
            OutputComplete: a stop string occurred.
        """
        tokens = output.token_ids
        self._count.add(output)
        finish_reason = FINISH_REASONS.get(output.finish_reason)
        text = "" if self._detokenizer is None else self._detokenizer.feed(tokens)
        if self._count.output_tokens > self._min_tokens:
            text = self._stop.feed(text)
        if self._stop.matched is not None:
            finish_reason = "stop"
        elif finish_reason is not None:
            text += self._stop.end()
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.feed(text)
            if finish_reason is not None:
                more, rest = self._reasoning.end()
                reasoning, text = reasoning + more, text + rest
        calls: Sequence[ToolCallPiece] = ()
        parser = self._parser
        if parser is not None:
            text, calls = parser.feed(text)
            if finish_reason is not None:
                text += parser.end()
                if finish_reason == "stop" and parser.ends_with_calls:
                    finish_reason = "tool_calls"
        stopped = self._stop.matched
        piece = Piece(
            text, array("I", tokens), output.logprobs, output.top_logprobs, finish_reason, stopped, calls, reasoning
        )
        self._sink.add(self.index, piece)
        if self._stop.matched is not None:
            raise OutputComplete

    def _marks(self, text: ModelText) -> list[str]:
        """Returns the special tokens the parsers look for."""
        marks = list(text.tool_format.special) if self._parser is not None and text.tool_format is not None else []
        if self._reasoning is not None and text.reasoning_format is not None:
            marks += [text.reasoning_format.begin, text.reasoning_format.end]
        return marks


def _reasoning_parser(frame: ResponseFrame, index: int) -> ReasoningParser | None:
    """Returns the parser of an output's reasoning; None if it has none, as if it is constrained from its begin."""
    request = frame.request
    if not request.is_chat or frame.text is None or request.constraint is not None:
        return None
    return frame.text.reasoning_parser(frame.prompt_of(index), frame.prompt_text_of(index))
