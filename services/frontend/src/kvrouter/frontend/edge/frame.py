"""The parts of a response around its choices: of chats and completions, of text and tokens, whole and streamed."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
from kvrouter.frontend.edge.text_request import TextPrompt, TextRequest
from kvrouter.frontend.edge.token_list import TokenPrompt, encode_token_ids
from kvrouter.frontend.packed_prompt import TOKEN_BYTES
from kvrouter.frontend.request.routed import Routed
from kvrouter.frontend.text.model_text import ModelText
from kvrouter.frontend.text.tool_calls import ToolCallPiece
from kvrouter.frontend.workers.output import Output
from kvrouter.v1.common_pb2 import KvSource, LowerTiers, Tier
from kvrouter.v1.frontend_pb2 import RoutedOn
from kvrouter.v1.texts import by_tier, rank_text, text_of
from kvrouter.v1.worker_pb2 import FinishReason, TopLogprobs

KV_SOURCE_HEADER = "x-kvrouter-kv-source"
"""Header with another rank that holds more of the prompt, for clients and engines."""


def describe_routing(routing: Routed) -> dict[str, Any]:
    """Returns how a request was routed, as responses contain it."""
    rank = routing.rank
    routed: dict[str, Any] = {
        "worker_id": rank.worker_id,
        "dp_rank": rank.dp_rank,
        "predicted_overlap_blocks": routing.predicted_overlap_blocks,
        "prompt_blocks": routing.prompt_blocks,
        "mode": routing.mode,
        "routed_on": text_of(RoutedOn, routing.routed_on),
        "router_us": routing.router_us,
        "queued_us": routing.queued_us,
    }
    if routing.predicted_lower_blocks is not None:
        routed["predicted_lower_blocks"] = by_tier(routing.predicted_lower_blocks)
    if (source := routing.kv_source) is not None:
        routed["kv_source"] = {
            "worker_id": source.rank.worker_id,
            "dp_rank": source.rank.dp_rank,
            "tier": text_of(Tier, source.tier),
            "blocks": source.blocks,
        }
    if routing.earlier_ranks:
        routed["earlier_ranks"] = [rank_text(rank) for rank in routing.earlier_ranks]
        routed["migrations"] = routing.migrations
        routed["inexact_continuation"] = routing.inexact_continuation
    if routing.prefill_reason:
        routed["prefill_reason"] = routing.prefill_reason
    if routing.prefill_rank is not None:
        routed["prefill_rank"] = rank_text(routing.prefill_rank)
        routed["prefill_us"] = routing.prefill_us
    if routing.model_choice:
        routed["model_choice"] = routing.model_choice
    if routing.ignored_overrides:
        routed["ignored_overrides"] = list(routing.ignored_overrides)
    return routed


def kv_source_text(source: KvSource) -> str:
    """Returns another rank that holds more of a prompt, as clients and engines get it in a header."""
    return f"{rank_text(source.rank)}; tier={text_of(Tier, source.tier)}; blocks={source.blocks}"


def migration_notice(routing: Routed) -> bytes:
    """Returns a field for the first chunk of a stream's continuation; empty if the request has not migrated."""
    return b',"kvrouter":' + msgspec.json.encode(describe_routing(routing)) if routing.migrations else b""


def routing_headers(routing: Routed) -> dict[str, str]:
    """Returns the headers saying where a request ran."""
    headers = {
        "x-request-id": routing.request_id,
        "x-kvrouter-worker": rank_text(routing.rank),
        "x-kvrouter-overlap-blocks": str(routing.predicted_overlap_blocks),
        "x-kvrouter-routed-on": text_of(RoutedOn, routing.routed_on),
    }
    if routing.kv_source is not None:
        headers[KV_SOURCE_HEADER] = kv_source_text(routing.kv_source)
    if routing.model_choice:
        headers["x-kvrouter-model-choice"] = routing.model_choice
    if routing.prefill_rank is not None:
        headers["x-kvrouter-prefill-worker"] = rank_text(routing.prefill_rank)
    return headers


FINISH_REASONS: dict[int, str | None] = {
    FinishReason.FINISH_REASON_UNSPECIFIED: None,
    FinishReason.FINISH_REASON_STOP: "stop",
    FinishReason.FINISH_REASON_LENGTH: "length",
    FinishReason.FINISH_REASON_ABORT: "abort",
    FinishReason.FINISH_REASON_ERROR: "error",
    FinishReason.FINISH_REASON_TOOL_CALLS: "tool_calls",
    FinishReason.FINISH_REASON_CONTENT_FILTER: "content_filter",
}
_STAND_IN = "\ufffd"
"""Stand-in for bytes of a part of a character."""


class Piece(msgspec.Struct, eq=False, gc=False):
    """A piece of a sequence."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """One for each token, if there are any."""
    top_logprobs: Sequence[TopLogprobs]
    """The most likely tokens at the place of each token."""
    finish_reason: str | None
    stop_reason: str | None
    tool_calls: Sequence[ToolCallPiece] = ()
    reasoning: str = ""


class TokenCount(msgspec.Struct, eq=False):
    """Counts the tokens of one sequence."""

    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens in the worker's cache, in any tier; None if the worker does not report them."""
    lower_cached_tokens: LowerTiers | None = None
    """Those of them below device memory, of the piece that reports them; None if there are none."""

    def add(self, output: Output) -> None:
        """Counts a piece of output."""
        self.output_tokens += output.tokens
        if self.cached_tokens is None:
            self.cached_tokens = output.cached_tokens
            self.lower_cached_tokens = output.lower_cached_tokens


class ResponseFrame:
    """Everything of a response but the output of its sequences."""

    def __init__(
        self, request: TextRequest, text: ModelText | None, prompts: Sequence[bytes], texts: Sequence[str] = ()
    ) -> None:
        """Creates it without output.

        Args:
            request: The request.
            text: The model's tokenizer; None for a model without one.
            prompts: The prompts as packed buffers.
            texts: Their texts if the response depends on them.
        """
        self.request = request
        self.text = text
        self.prompts = prompts
        self._texts = texts
        self._sequences = sequences = request.sequences
        self.counts = [TokenCount(len(each) // TOKEN_BYTES) for each in prompts for _ in range(sequences)]
        """The tokens of each sequence."""
        self.returns_prompt = bool(request.fields.return_token_ids)
        """Whether the prompt is returned too: only on request, since it may be long."""
        self.returns_token_ids = self.returns_prompt or (text is None and request.fields.return_token_ids is None)
        """Whether token ids are returned. Without a tokenizer they are the whole output."""
        self._created = int(time.time())
        self._routing: Routed | None = None

    @property
    def request_id(self) -> str:
        """Id of the request; empty until it is routed."""
        return "" if self._routing is None else self._routing.request_id

    @property
    def headers(self) -> dict[str, str]:
        """Headers with the place of the first sequence."""
        return {} if self._routing is None else routing_headers(self._routing)

    def routed(self, index: int, routing: Routed) -> None:
        """Adds where a sequence runs. The response has the place of the first."""
        if index == 0 or self._routing is None:
            self._routing = routing

    def prompt_of(self, index: int) -> bytes:
        """Returns the prompt of a sequence as a packed buffer."""
        return self.prompts[index // self._sequences]

    def prompt_text_of(self, index: int) -> str | None:
        """Returns the text of a sequence's prompt; None if the response does not depend on it."""
        return self._texts[index // self._sequences] if self._texts else None

    def prompt_json(self, index: int) -> msgspec.Raw:
        """Returns the token ids of a sequence's prompt as JSON."""
        source = self.request.prompts[index // self._sequences]
        return source.as_json() if isinstance(source, TokenPrompt) else encode_token_ids(self.prompt_of(index))

    def echo(self, index: int) -> str:
        """Returns the prompt of a sequence as text if the response repeats it; otherwise an empty text."""
        if not self.request.echo or self.text is None:
            return ""
        source = self.request.prompts[index // self._sequences]
        return source.text if isinstance(source, TextPrompt) else self.prompt_text_of(index) or ""

    def envelope(self) -> dict[str, Any]:
        """Returns the fields before the choices of a response or chunk."""
        is_chat = self.request.is_chat
        prefix = "chatcmpl" if is_chat else "cmpl"
        kind = "chat.completion" if is_chat else "text_completion"
        return {
            "id": f"{prefix}-{self._routing.request_id}" if self._routing is not None else prefix,
            "object": f"{kind}.chunk" if is_chat and self.request.fields.stream else kind,
            "created": self._created,
            "model": self.request.fields.model,
        }

    def whole(self, choices: Sequence[dict[str, Any]]) -> bytes:
        """Returns a whole response as JSON. Without choices it is the last chunk of a stream, which has the usage."""
        return msgspec.json.encode({**self.envelope(), "choices": choices, **self._usage()})

    def _usage(self) -> dict[str, Any]:
        """Returns the numbers of tokens, and how the first sequence was routed."""
        prompt_tokens = output_tokens = 0
        details: defaultdict[str, int] = defaultdict(int)
        for index, count in enumerate(self.counts):
            output_tokens += count.output_tokens
            if index % self._sequences:
                continue  # Only the first sequence of each prompt counts the prompt.
            prompt_tokens += count.prompt_tokens
            if count.cached_tokens is not None:
                details["cached_tokens"] += count.cached_tokens
                lower = count.lower_cached_tokens
                for tier, loaded in by_tier(lower).items() if lower is not None else ():
                    if loaded:
                        details[f"{tier}_cached_tokens"] += loaded
        return {
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": output_tokens,
                "total_tokens": prompt_tokens + output_tokens,
                "prompt_tokens_details": details or None,
            },
            "kvrouter": None if self._routing is None else describe_routing(self._routing),
        }

    def logprobs(self, piece: Piece, offset: int) -> dict[str, Any] | None:
        """Returns the log probabilities of tokens beginning at an offset of the text; None if there are none."""
        values = piece.logprobs
        if len(values) != len(piece.token_ids):
            return None
        top = [self._alternatives(each) for each in piece.top_logprobs] if self.request.top_logprobs else []
        if self.request.is_chat:
            top += [[]] * (len(values) - len(top))
            content = [
                self._entry(token, value) | {"top_logprobs": [self._entry(*each) for each in alternatives]}
                for token, value, alternatives in zip(piece.token_ids, values, top, strict=False)
            ]
            return {"content": content, "refusal": None}
        tokens = [self._text_of(token) for token in piece.token_ids]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        # The token itself is among them, as at vLLM, even if it is not one of the most likely.
        shown = [
            {**{self._text_of(token): value for token, value in each}, own: logprob}
            for each, own, logprob in zip(top, tokens, values, strict=False)
        ]
        return {"tokens": tokens, "token_logprobs": list(values), "top_logprobs": shown or None, "text_offset": offsets}

    def _text_of(self, token: int) -> str:
        return f"token_id:{token}" if self.text is None else self.text.text_of([token])

    def _alternatives(self, top: TopLogprobs) -> list[tuple[int, float]]:
        """Returns the most likely tokens of one place with their log probabilities, as many as requested."""
        return list(zip(top.token_ids, top.logprobs, strict=False))[: self.request.top_logprobs]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        """Returns a token of a chat. The text of a part of a character is a stand-in, unlike its bytes."""
        text, tokenizer = self._text_of(token), self.text and self.text.tokenizer
        encoded = tokenizer.bytes_of(token) if tokenizer and _STAND_IN in text else text.encode()
        return {"token": text, "logprob": logprob, "bytes": list(encoded)}
