"""Responses of ``/v1/completions`` and ``/v1/chat/completions``, whole and streamed."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrouter.mocker.openai.bodies import GenerationBody
from kvrouter.mocker.serving.generations import Piece
from kvrouter.mocker.serving.http_responses import event
from kvrouter.mocker.serving.tokenizer import decode

_LOGPROB = -0.5
"""Log probability of every generated token."""


@dataclass
class Choice:
    """The output of one sequence so far."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, piece: Piece) -> None:
        """Adds a piece."""
        self.token_ids += piece.token_ids
        self.text += piece.text
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason


class Responses:
    """Builds the responses to one request."""

    ends_with = b"data: [DONE]\n\n"
    """The end of a stream."""

    def __init__(
        self,
        body: GenerationBody,
        response_id: str,
        model: str,
        prompts: Sequence[Sequence[int]],
        *,
        chat: bool,
        reports_cached_tokens: bool,
        stop_field: str = "stop_reason",
    ) -> None:
        """Args:
        body: The request.
        response_id: Id of the response.
        model: Name of the model.
        prompts: Token ids of each prompt.
        chat: Whether it is a chat.
        reports_cached_tokens: Whether the usage says how many prompt tokens the cache had.
        stop_field: Name of the field with the stop string or token.
        """  # noqa: D205
        self._body = body
        self._id = response_id
        self._model = model
        self._prompts = prompts
        self._choices = [Choice() for _ in prompts for _ in range(body.choices)]
        self._chat = chat
        self._stop_field = stop_field
        self._reports_cached_tokens = reports_cached_tokens
        tool = body.called_tool()
        self._tool = None if tool is None else str(tool.get("name"))
        self._call_ids = [f"call_{uuid.uuid4().hex[:24]}" for _ in self._choices]
        self._cached_tokens: dict[int, int] = {}
        self._created = int(time.time())
        options = body.stream_options
        self._usage_in_each = bool(options and options.continuous_usage_stats)
        self._usage_at_end = bool(options and options.include_usage)

    def add(self, index: int, piece: Piece) -> None:
        """Adds a piece of a sequence."""
        self._choices[index].add(piece)
        if piece.cached_tokens is not None:
            self._cached_tokens.setdefault(self._prompt_of(index), piece.cached_tokens)

    def whole(self) -> dict[str, Any]:
        """Returns the response as a whole, when all sequences have ended."""
        choices = [self._whole_choice(index, choice) for index, choice in enumerate(self._choices)]
        whole = self._envelope(choices, streams=False) | {"usage": self.usage()}
        if self._chat and self._body.return_token_ids:
            whole["prompt_token_ids"] = self._prompts[0]
        return whole

    def chunks(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """Yields the chunks of the stream for a piece, which is added."""
        is_first = not self._choices[index].token_ids
        self.add(index, piece)
        if is_first and self._chat:
            chunk = self._envelope([{"index": index, "delta": {"role": "assistant", "content": ""}}], streams=True)
            if self._body.return_token_ids:
                chunk["prompt_token_ids"] = self._prompts[0]
            yield chunk
        choice: dict[str, Any] = {"index": index}
        choice["finish_reason"] = self._finish_reason(piece.finish_reason)
        choice |= {"delta": self._delta(index, piece.text, is_first=is_first)} if self._chat else {"text": piece.text}
        choice |= {"logprobs": self._logprobs(piece.token_ids), self._stop_field: piece.stop_reason}
        if self._body.return_token_ids:
            choice["token_ids"] = piece.token_ids
            if is_first and not self._chat:
                choice["prompt_token_ids"] = self._prompts[self._prompt_of(index)]
        chunk = self._envelope([choice], streams=True)
        if self._usage_in_each:
            chunk["usage"] = self.usage()
        yield chunk

    def last_chunk(self) -> dict[str, Any] | None:
        """Returns the chunk after all output, with the usage, if it was requested."""
        return self._envelope([], streams=True) | {"usage": self.usage()} if self._usage_at_end else None

    def encoded(self, chunk: dict[str, Any]) -> bytes:
        """Returns a chunk as a server-sent event."""
        return event(chunk)

    def usage(self) -> dict[str, Any]:
        """Returns the numbers of tokens so far."""
        prompt = sum(map(len, self._prompts))
        output = sum(len(choice.token_ids) for choice in self._choices)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + output,
            "completion_tokens": output,
            "prompt_tokens_details": None,
        }
        if self._reports_cached_tokens:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(self._cached_tokens.values())}
        return usage

    def _prompt_of(self, index: int) -> int:
        return index // self._body.choices

    def _envelope(self, choices: list[dict[str, Any]], *, streams: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self._chat:
            kind = "chat.completion.chunk" if streams else "chat.completion"
        envelope = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return envelope | {"choices": choices}

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        shown: dict[str, Any] = {"index": index}
        message = {"role": "assistant"} | self._delta(index, choice.text, is_first=True)
        if self._tool is not None:
            message["content"] = None
        shown |= {"message": message} if self._chat else {"text": choice.text}
        shown |= {
            "logprobs": self._logprobs(choice.token_ids),
            "finish_reason": self._finish_reason(choice.finish_reason),
            self._stop_field: choice.stop_reason,
        }
        if self._body.return_token_ids:
            shown["token_ids"] = choice.token_ids
            if not self._chat:
                shown["prompt_token_ids"] = self._prompts[self._prompt_of(index)]
        return shown

    def _delta(self, index: int, text: str, *, is_first: bool) -> dict[str, Any]:
        """Returns text of a message: content, or arguments of a call, whose first piece has its name."""
        if self._tool is None:
            return {"content": text}
        call: dict[str, Any] = {"index": 0, "function": {"arguments": text}}
        if is_first:
            call |= {"id": self._call_ids[index], "type": "function"}
            call["function"]["name"] = self._tool
        return {"tool_calls": [call]}

    def _finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if self._tool is not None and reason == "stop" else reason

    def _logprobs(self, token_ids: Sequence[int]) -> dict[str, Any] | None:
        if not self._body.wanted_logprobs():
            return None
        texts = [decode([token_id]) for token_id in token_ids]
        if self._chat:
            content = [
                {"token": text, "logprob": _LOGPROB, "bytes": list(text.encode()), "top_logprobs": []} for text in texts
            ]
            return {"content": content}
        offsets = [sum(map(len, texts[:number])) for number in range(len(texts))]
        return {
            "tokens": texts,
            "token_logprobs": [_LOGPROB] * len(texts),
            "top_logprobs": [{text: _LOGPROB} for text in texts],
            "text_offset": offsets,
        }
