"""The bodies of ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``, as the Anthropic API has them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from kvrouter.frontend.edge.request_fields import Int32, OnlyDefault, UInt32
from kvrouter.frontend.edge.translated_request import RoutingFields


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which tools the model may or must call."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Form of the output."""

    type: str
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Effort and form of the output."""

    effort: str | None = None
    format: OutputFormat | None = None
    task_budget: Any = None


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether the model reasons before it answers."""

    type: str
    budget_tokens: UInt32 | None = None
    display: str | None = None


class PromptFields(RoutingFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields that make the prompt. None stands for the default."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # Of the client's business and of Anthropic's own servers.
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    betas: list[str] | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    # They run on Anthropic's own servers.
    mcp_servers: OnlyDefault = None


class MessagesFields(PromptFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields of a message to create."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=(1 << 32) - 1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: Int32 | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    diagnostics: dict[str, Any] | None = None
    container: OnlyDefault = None


class EngineMessagesFields(MessagesFields, frozen=True, forbid_unknown_fields=False, kw_only=True):
    """The same for an engine that serves the API itself: fields it may know besides are its own business."""
