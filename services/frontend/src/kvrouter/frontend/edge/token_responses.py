"""Responses of ``/v1/completions`` for token ids, whole and as a stream: in vLLM's format, with an empty ``text``."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
from kvrouter.frontend.edge.completion_request import CompletionRequest
from kvrouter.frontend.edge.event_stream import EventStream, NumberedEvents
from kvrouter.frontend.edge.frame import FINISH_REASONS, ResponseFrame
from kvrouter.frontend.edge.response_stream import ResponseStream
from kvrouter.frontend.edge.token_list import encode_token_ids
from kvrouter.frontend.packed_prompt import TOKEN_BYTES
from kvrouter.frontend.workers.output import Output
from kvrouter.v1.frontend_pb2 import RoutingInfo


class WholeCompletion:
    """An OutputReceiver that collects the output, for one response."""

    def __init__(self, request: CompletionRequest) -> None:
        self.frame = ResponseFrame.of_tokens(request)
        self._token_ids = array("I")
        self._finish_reason: str | None = None

    def routed(self, routing: RoutingInfo) -> None:
        """Adds where the request runs."""
        self.frame.routed(0, routing)

    def output(self, output: Output) -> None:
        """Adds a piece of the output."""
        self.frame.counts[0].add(output)
        self._token_ids.extend(output.token_ids)
        self._finish_reason = FINISH_REASONS.get(output.finish_reason)

    def body(self) -> bytes:
        """Returns the response as JSON."""
        frame = self.frame
        choice: dict[str, Any] = {
            "index": 0,
            "text": "",
            "logprobs": None,
            "finish_reason": self._finish_reason,
            "stop_reason": None,
        }
        if frame.returns_token_ids:
            choice["token_ids"] = encode_token_ids(self._token_ids)
        if frame.returns_prompt:
            choice["prompt_token_ids"] = frame.prompt_json(0)
        return msgspec.json.encode(frame.envelope() | {"choices": [choice]} | frame.usage())


class CompletionStream(ResponseStream):
    """An OutputReceiver writing each piece as a chunk when it arrives. Kept tokens become one chunk."""

    def __init__(self, request: CompletionRequest, events: EventStream) -> None:
        super().__init__(ResponseFrame.of_tokens(request), events)
        self._returns_token_ids = self._frame.returns_token_ids
        self._prompt_is_due = self._frame.returns_prompt
        self._count = self._frame.counts[0]
        self._before = b""
        """The text of a chunk before its token ids."""
        self._after = {
            number: b',"logprobs":null,"finish_reason":%b,"stop_reason":null}]}' % msgspec.json.encode(name)
            for number, name in FINISH_REASONS.items()
        }
        """The text after them, by finish reason."""
        self._single_tokens: NumberedEvents | None = None
        """Writes chunks with one token and nothing else, as nearly all are; None until the first chunk is written."""
        self._unread_tokens = array("I")
        self._unread_finish_reason: int = 0

    def routed(self, routing: RoutingInfo) -> None:
        """Adds where the request runs."""
        self._place(0, routing)
        self._before = self._head + b',"choices":[{"index":0,"text":""'
        self._single_tokens = None

    def output(self, output: Output) -> None:
        """Writes a piece of the output, or keeps its tokens if the client does not read.

        Raises:
            TooLarge: the client has left too much unread.
        """
        if (
            (single_tokens := self._single_tokens) is not None
            and type(output) is Output
            and output.tokens == 1
            and self._flushing is None
            and single_tokens.write(output.token_ids[0])
        ):
            self._count.output_tokens += 1
            return
        self._count.add(output)
        if not self._must_keep:
            self._write_tokens(output.token_ids, output.finish_reason)
            return
        self._unread_tokens.extend(output.token_ids)
        self._unread_finish_reason = output.finish_reason
        self._kept(output.tokens * TOKEN_BYTES)

    def _write_kept(self) -> None:
        token_ids, self._unread_tokens = self._unread_tokens, array("I")
        self._write_tokens(token_ids, self._unread_finish_reason)

    def _write_tokens(self, token_ids: Any, finish_reason: int) -> None:
        before, after = self._before, self._after.get(finish_reason) or self._after[0]
        if notice := self._notices.pop(0, b""):
            after = b"%b%b}" % (after[:-1], notice)
        if not self._returns_token_ids:
            self._events.write_event(before + after)
            return
        if self._prompt_is_due and token_ids:
            self._prompt_is_due = False
            after = b',"prompt_token_ids":%b%b' % (self._frame.prompt_json(0), after)
        self._events.write_event(b'%b,"token_ids":%b%b' % (before, encode_token_ids(token_ids), after))
        if self._single_tokens is None and not self._prompt_is_due:
            self._single_tokens = self._events.numbered(before + b',"token_ids":[', b"]" + self._after[0])
