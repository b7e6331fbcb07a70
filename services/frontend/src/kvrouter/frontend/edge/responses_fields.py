"""The body of ``POST /v1/responses``, as the OpenAI API has it."""

from __future__ import annotations

from typing import Any

import msgspec
from kvrouter.frontend.edge.request_fields import OnlyDefault, UInt32
from kvrouter.frontend.edge.translated_request import RoutingFields


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much the model reasons. Summaries are those of OpenAI's own models."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Form of the output."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_obfuscation: bool | None = None


class ResponsesFields(RoutingFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields of the body. None stands for the default."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    max_output_tokens: UInt32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    include: list[str] | None = None
    # Of the client's business, and of OpenAI's own servers and models.
    metadata: dict[str, str | None] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    context_management: Any = None
    truncation: str | None = None
    max_tool_calls: UInt32 | None = None
    client_metadata: dict[str, Any] | None = None
    # They need stored responses, or run on OpenAI's servers.
    previous_response_id: OnlyDefault = None
    store: OnlyDefault = False
    background: OnlyDefault = False
    background_options: OnlyDefault = None
    conversation: OnlyDefault = None
    prompt: OnlyDefault = None
    access_programs: OnlyDefault = None
    image: OnlyDefault = None
    moderation: OnlyDefault = None
    top_logprobs: OnlyDefault = 0


class EngineResponsesFields(ResponsesFields, frozen=True, forbid_unknown_fields=False, kw_only=True):
    """The same for an engine that serves the API itself: fields it may know besides are its own business."""
