"""The parts of a response around its choices, for chats and completions, whole and streamed."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Any, Protocol

from kvrouter.frontend.api.completions import describe_routing, routing_headers
from kvrouter.frontend.api.openai.choice import Choice
from kvrouter.frontend.api.openai.text_request import TextPrompt, TextRequest
from kvrouter.frontend.text.model_text import ModelText
from kvrouter.v1.frontend_pb2 import RoutingInfo
from kvrouter.v1.worker_pb2 import TopLogprobs

_STAND_IN = "\ufffd"
"""What stands in a text for bytes that are no whole character."""


class WithLogprobs(Protocol):
    """Tokens with their log probabilities, if there are any."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens."""
        ...

    @property
    def logprobs(self) -> Sequence[float]:
        """One for each token."""
        ...

    @property
    def top_logprobs(self) -> Sequence[TopLogprobs]:
        """The most likely tokens at the place of each token."""
        ...


class TextFrame:
    """What whole responses and streams have in common."""

    def __init__(self, request: TextRequest, text: ModelText | None, prompts: Sequence[bytes]) -> None:
        self.request = request
        self.text = text
        self.prompts = prompts
        self.choices: list[Choice] = []
        asked = request.fields.return_token_ids
        self.returns_token_ids = text is None if asked is None else asked
        """Whether token ids are returned. Without a tokenizer they are all that there is."""
        self.returns_prompt = bool(asked)
        self._created = int(time.time())
        self._routing: RoutingInfo | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Headers that say where the first sequence runs."""
        return {} if self._routing is None else routing_headers(self._routing)

    def routed(self, index: int, routing: RoutingInfo) -> None:
        """Adds where a sequence runs. The response says it of the first."""
        if index == 0 or self._routing is None:
            self._routing = routing

    def prompt_of(self, index: int) -> bytes:
        """Returns the prompt of a sequence as a packed buffer."""
        return self.prompts[index // self.request.sequences]

    def echo(self, index: int) -> str:
        """Returns the prompt of a sequence as text if the response repeats it; otherwise an empty text."""
        if not self.request.echo or self.text is None:
            return ""
        source = self.request.prompts[index // self.request.sequences]
        return source.text if isinstance(source, TextPrompt) else self.text.text_of(array("I", self.prompt_of(index)))

    def envelope(self, kind: str) -> dict[str, Any]:
        """Returns the fields before the choices of an object of this kind."""
        prefix = "chatcmpl" if self.request.is_chat else "cmpl"
        return {
            "id": f"{prefix}-{self._routing.request_id}" if self._routing is not None else prefix,
            "object": kind,
            "created": self._created,
            "model": self.request.fields.model,
        }

    def usage(self) -> dict[str, Any]:
        """Returns the numbers of tokens, and how the first sequence was routed."""
        each = self.choices[:: self.request.sequences]
        prompt_tokens = sum(choice.prompt_tokens for choice in each)
        output_tokens = sum(choice.output_tokens for choice in self.choices)
        cached = [choice.cached_tokens for choice in each if choice.cached_tokens is not None]
        return {
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": output_tokens,
                "total_tokens": prompt_tokens + output_tokens,
                "prompt_tokens_details": {"cached_tokens": sum(cached)} if cached else None,
            },
            "kvrouter": None if self._routing is None else describe_routing(self._routing),
        }

    def logprobs(self, output: WithLogprobs, offset: int) -> dict[str, Any] | None:
        """Returns the log probabilities of tokens that begin at an offset of the text; None if there are none."""
        values = output.logprobs
        if not self.request.logprobs or len(values) != len(output.token_ids):
            return None
        top = [self._alternatives(each) for each in output.top_logprobs] if self.request.top_logprobs else []
        if self.request.is_chat:
            top += [[]] * (len(values) - len(top))
            content = [
                self._entry(token, value) | {"top_logprobs": [self._entry(*each) for each in alternatives]}
                for token, value, alternatives in zip(output.token_ids, values, top, strict=False)
            ]
            return {"content": content, "refusal": None}
        tokens = [self._text_of(token) for token in output.token_ids]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        # The token itself is among them, as at vLLM, even if it is not one of the most likely.
        shown = [
            {**{self._text_of(token): value for token, value in each}, own: logprob}
            for each, own, logprob in zip(top, tokens, values, strict=False)
        ]
        return {
            "tokens": tokens,
            "token_logprobs": list(values),
            "top_logprobs": shown or None,
            "text_offset": offsets,
        }

    def _text_of(self, token: int) -> str:
        return f"token_id:{token}" if self.text is None else self.text.text_of([token])

    def _alternatives(self, top: TopLogprobs) -> list[tuple[int, float]]:
        """Returns the most likely tokens of one place with their log probabilities, as many as requested."""
        return list(zip(top.token_ids, top.logprobs, strict=False))[: self.request.top_logprobs]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        """Returns a token of a chat. The text of a part of a character is a stand-in, unlike its bytes."""
        text = self._text_of(token)
        is_part = _STAND_IN in text and self.text is not None
        encoded = self.text.tokenizer.bytes_of(token) if is_part and self.text is not None else text.encode()
        return {"token": text, "logprob": logprob, "bytes": list(encoded)}
