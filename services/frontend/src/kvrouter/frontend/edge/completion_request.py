"""The body of ``POST /v1/completions``: vLLM's fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from kvrouter.frontend.access.body_room import BodyTooLarge
from kvrouter.frontend.edge.json_body import MAX_FIELDS_BYTES, decode_json, invalid, without_prompt
from kvrouter.frontend.edge.request_fields import OnlyDefault, SharedFields, UInt32, check_top_logprobs, unsupported
from kvrouter.frontend.edge.text_request import TextRequest, TokenPrompt, parse_prompts
from kvrouter.frontend.edge.token_list import Prompt
from kvrouter.frontend.text.model_text import PromptSource
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest

DEFAULT_MAX_TOKENS = 16

_TEXTS = re.compile(rb'\s*(?:"|\[\s*["\[])')
"""Begin of a prompt other than a list of token ids: a text, or a list of texts or lists."""


class CompletionFields(SharedFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields of the body. Fields for engines alone are refused instead of silently dropped."""

    prompt: msgspec.Raw
    max_tokens: UInt32 | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    best_of: UInt32 | None = None
    logprobs: UInt32 | None = None
    suffix: OnlyDefault = None
    prompt_embeds: OnlyDefault = None


# As lenient as pydantic, with which vLLM parses bodies: "5" is accepted where a number is expected.
_FIELDS = msgspec.json.Decoder(CompletionFields, strict=False)


class CompletionRequest(NamedTuple):
    """A parsed completion request."""

    fields: CompletionFields
    prompt: Prompt
    """The prompt if it is a single list of token ids; otherwise empty."""
    prompts: Sequence[PromptSource]
    """All prompts."""

    @classmethod
    def parse(
        cls, body: bytes | bytearray, *, max_prompt_tokens: int, check_text: Callable[[str], object] = lambda _: None
    ) -> CompletionRequest:
        """Parses a body. Uses up to four times its size in memory and stops at the first error.

        Args:
            body: JSON.
            max_prompt_tokens: Maximum number of token ids of a prompt.
            check_text: Called with the model of a request with text; raises if it takes none.

        Raises:
            BadRequest: it is not JSON, or a field is missing, unknown or out of range; the error names the field.
            BodyTooLarge: the fields besides the prompt are too long.
            PromptTooLong: the prompt has more tokens than ``max_prompt_tokens``.
        """
        prompt: Prompt | None = None
        body, text = without_prompt(body)
        if text is not None and not _TEXTS.match(text):
            prompt = Prompt.parse(text, limit=max_prompt_tokens)
        if len(body) > MAX_FIELDS_BYTES:
            raise BodyTooLarge(
                f"body: {len(body)} bytes besides the prompt; the limit is {MAX_FIELDS_BYTES}",
                advice="Send shorter fields.",
            )
        fields = decode_json(_FIELDS, body)
        text = text or bytes(fields.prompt)
        prompts: Sequence[PromptSource]
        if prompt is None and _TEXTS.match(text):
            # Before the text is decoded, which may take four times its size.
            check_text(fields.model)
            special = fields.add_special_tokens is not False
            prompts = parse_prompts(text, add_special_tokens=special, limit=max_prompt_tokens)
            prompt = Prompt(b"", b"")
        else:
            prompt = prompt or Prompt.parse(text, limit=max_prompt_tokens)
            prompts = [TokenPrompt(prompt)]
        fields.check(len(prompts))
        if fields.echo and fields.logprobs is not None:
            raise invalid(
                "logprobs",
                "prompts have none, and echo is true",
                "Leave logprobs or echo out: workers that receive tokens report those of the output only.",
            )
        check_top_logprobs(fields.logprobs or 0, "logprobs")
        if fields.best_of not in (None, fields.n or 1):
            raise unsupported("best_of")
        return cls(fields, prompt, prompts)

    def with_fields(self, fields: CompletionFields) -> CompletionRequest:
        """Returns the request with other fields."""
        return self if fields is self.fields else self._replace(fields=fields)

    @property
    def max_tokens(self) -> int:
        """Maximum number of output tokens."""
        return DEFAULT_MAX_TOKENS if self.fields.max_tokens is None else self.fields.max_tokens

    @property
    def is_plain(self) -> bool:
        """Whether it is one sequence of token ids after one prompt of token ids."""
        fields = self.fields
        return (
            (fields.n is None or fields.n == 1)
            and not fields.stop
            and not fields.echo
            and fields.logprobs is None
            and fields.structured_output() is None
            and len(self.prompts) == 1
            and isinstance(self.prompts[0], TokenPrompt)
        )

    def to_generate(self) -> FrontendServiceGenerateRequest:
        """Returns the request as the Frontend's gRPC contract defines it, without the prompt."""
        return self.fields.generate_request(self.max_tokens)

    def to_text_request(self) -> TextRequest:
        """Returns the request for any number of prompts and sequences."""
        return TextRequest(
            fields=self.fields,
            prompts=self.prompts,
            max_tokens=self.max_tokens,
            is_chat=False,
            echo=bool(self.fields.echo),
            logprobs=self.fields.logprobs is not None,
            top_logprobs=self.fields.logprobs or 0,
        )
