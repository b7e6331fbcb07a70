"""The body of ``POST /v1/completions``: vLLM's fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec
from kvrouter.frontend.access.body_room import BodyTooLarge
from kvrouter.frontend.edge.json_body import MAX_FIELDS_BYTES, decode_json, invalid, without_prompt
from kvrouter.frontend.edge.request_fields import OnlyDefault, SharedFields, UInt32, check_top_logprobs, unsupported
from kvrouter.frontend.edge.text_request import TextRequest, parse_prompts
from kvrouter.frontend.edge.token_list import TokenPrompt
from kvrouter.frontend.text.model_text import PromptSource

DEFAULT_MAX_TOKENS = 16

_TEXTS = re.compile(rb'\s*(?:"|\[\s*["\[])')
"""Begin of a prompt other than a list of token ids: a text, or a list of texts or lists."""


class CompletionFields(SharedFields, forbid_unknown_fields=True, kw_only=True):
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


def parse_completion(
    body: bytes | bytearray, *, max_prompt_tokens: int, check_text: Callable[[str], object] = lambda _: None
) -> TextRequest:
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
    prompt: TokenPrompt | None = None
    body, view = without_prompt(body)
    if view is not None and not _TEXTS.match(view):
        prompt = TokenPrompt(view, limit=max_prompt_tokens)
    if len(body) > MAX_FIELDS_BYTES:
        raise BodyTooLarge(
            f"body: {len(body)} bytes besides the prompt; the limit is {MAX_FIELDS_BYTES}",
            advice="Send shorter fields.",
        )
    fields = decode_json(_FIELDS, body)
    text = view or bytes(fields.prompt)
    prompts: Sequence[PromptSource]
    if prompt is None and _TEXTS.match(text):
        # Before the text is decoded, which may take four times its size.
        check_text(fields.model)
        special = fields.add_special_tokens is not False
        prompts = parse_prompts(bytes(text), add_special_tokens=special, limit=max_prompt_tokens)
    else:
        prompts = [prompt or TokenPrompt(text, limit=max_prompt_tokens)]
    constraint = fields.check(len(prompts))
    if fields.logprobs is not None:
        if fields.echo:
            raise invalid(
                "logprobs",
                "prompts have none, and echo is true",
                "Leave logprobs or echo out: workers that receive tokens report those of the output only.",
            )
        check_top_logprobs(fields.logprobs, "logprobs")
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise unsupported("best_of")
    return TextRequest(
        fields,
        prompts,
        DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens,
        is_chat=False,
        echo=bool(fields.echo),
        logprobs=fields.logprobs is not None,
        top_logprobs=fields.logprobs or 0,
        constraint=constraint,
    )
