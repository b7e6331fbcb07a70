"""A request of another API, translated to a chat: Anthropic's Messages and OpenAI's Responses.

A chat is rendered, routed and run as any other. Only its two ends differ: the body becomes the body of a chat here, and
the pieces of its one choice become a response of the client's API.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import msgspec
from kvrouter.frontend.edge.chat_prompt import ChatPrompt
from kvrouter.frontend.edge.chat_request import ChatFields, to_text_request
from kvrouter.frontend.edge.choice import WholeSink
from kvrouter.frontend.edge.event_stream import EventStream
from kvrouter.frontend.edge.frame import ResponseFrame
from kvrouter.frontend.edge.json_body import Place, check_structure, convert_fields, invalid
from kvrouter.frontend.edge.response_stream import NamedEvents
from kvrouter.frontend.edge.text_request import TextRequest
from kvrouter.frontend.text.client_work import Slices
from kvrouter.frontend.text.model_text import ModelText, PromptSource
from kvrouter.frontend.text.prompt_media import PromptMedia
from kvrouter.v1.errors import BadRequest, KvRouterError

ROUTING_FIELDS = ("request_id", "conversation_id", "worker_id", "dp_rank", "migration_limit", "router_config_override")
"""Fields of kvrouter itself, which no engine gets."""
KEPT_FIELDS = ("cache_salt", "priority", "chat_template_kwargs")
"""Fields a chat has under the same name."""


class RoutingFields(msgspec.Struct, frozen=True, kw_only=True):
    """The model, and fields of kvrouter and vLLM, in the bodies of all APIs. A chat checks their values."""

    model: str
    cache_salt: Any = None
    priority: Any = None
    chat_template_kwargs: Any = None
    request_id: Any = None
    conversation_id: Any = None
    worker_id: Any = None
    dp_rank: Any = None
    migration_limit: Any = None
    router_config_override: Any = None


class TranslatedRequest(ABC):
    """One request, parsed and translated."""

    path: ClassVar[str]
    """Path of its API."""
    names: ClassVar[Mapping[str, str]]
    """Fields of the body by the fields of a chat they become, where they differ."""

    chat: dict[str, Any]
    """Body of the chat, with the routing fields of the client."""

    @classmethod
    def read(cls, body: bytes | bytearray) -> Self:
        """Parses and translates a body.

        Raises:
            BadRequest: it is malformed, or has a field or content that no chat can express; the error names it.
        """
        with shallow():
            return cls.parse(body)

    @classmethod
    @abstractmethod
    def parse(cls, body: bytes | bytearray, *, is_checked: bool = False) -> Self:
        """Parses and translates a body that is not nested deeply; see ``read``, and ``decode_json`` for the option."""

    @classmethod
    @abstractmethod
    def engine_chat(cls, body: bytes | bytearray, *, late_systems: bool = False) -> dict[str, Any]:
        """Returns the chat that an engine serving the API itself makes of a checked body, to find its prompt.

        Args:
            body: The body.
            late_systems: Whether the model's template takes system messages after the first message.

        Raises:
            BadRequest: it cannot be translated.
        """

    @classmethod
    @abstractmethod
    def check_passed(cls, body: bytes | bytearray) -> None:
        """Checks a valid body that an engine gets as it is.

        Raises:
            BadRequest: it needs more than one engine can know.
        """

    @abstractmethod
    def whole(self, frame: ResponseFrame) -> WholeSink:
        """Returns the sink of a response that is no stream."""

    @abstractmethod
    def streamed(self, frame: ResponseFrame, events: EventStream, *, keeps: bool) -> NamedEvents:
        """Returns the sink of a stream; see ``NamedEvents``."""

    def to_text_request(self, characters: int) -> TextRequest:
        """Returns the chat for workers that receive tokens. ``characters`` is the size of the body.

        Raises:
            BadRequest: a field is out of range or not supported; the error names the field of the body.
        """
        try:
            with shallow():
                return to_text_request(convert_fields(self.chat, ChatFields), characters)
        except BadRequest as error:
            self.rename(error)
            raise

    def rename(self, error: KvRouterError) -> None:
        """Gives an error of the chat the name of the field in the body."""
        root, dot, rest = error.info.field.partition(".")
        error.info.field = self.names.get(root, root) + dot + rest

    def engine_messages(self) -> bytes:
        """Returns the messages for an engine's chats, as JSON."""
        return msgspec.json.encode(self.chat["messages"])

    def engine_body(self, messages: bytes) -> bytes:
        """Returns the body for an engine's chats with these messages. Its stream ends with its usage."""
        chat = {name: value for name, value in self.chat.items() if name not in ROUTING_FIELDS}
        if chat.get("stream"):
            chat["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(chat | {"messages": msgspec.Raw(messages)})


@contextmanager
def shallow() -> Iterator[None]:
    """Refuses what is nested more deeply than the translation can follow.

    Raises:
        BadRequest: it is.
    """
    try:
        yield
    except RecursionError:
        raise BadRequest("body: nested too deeply", advice="Send one JSON object without deep nesting.") from None


class TranslatedPrompt(PromptSource):
    """The prompt of a body that is translated to a chat, by an engine or here."""

    field = "messages"

    def __init__(
        self,
        body: bytes | bytearray,
        kind: type[TranslatedRequest],
        media: PromptMedia | None = None,
        chat: Mapping[str, Any] | None = None,
    ) -> None:
        """Creates it.

        Args:
            body: The body.
            kind: Its API.
            media: Takes its images.
            chat: The chat it was translated to here; None if an engine translates it. Then it is translated here only
                to be rendered.
        """
        self._body = body
        self._kind = kind
        self._chat = chat
        self.characters = len(body)
        self._media = media

    def slices(self, text: ModelText | None, limit: int) -> Slices[bytes]:
        """Renders and tokenizes the prompt in slices, and returns its tokens.

        Raises:
            BadRequest, PromptTooLong.
        """
        with shallow():
            chat = self._engine_chat(text) if self._chat is None else self._chat
            prompt = chat_prompt(chat, self.characters, self._media)
        return (yield from prompt.slices(text, limit))

    def _engine_chat(self, text: ModelText | None) -> Mapping[str, Any]:
        check_structure(self._body)
        template = None if text is None else text.template
        late_systems = template is not None and template.takes_late_systems
        return self._kind.engine_chat(self._body, late_systems=late_systems)


def chat_prompt(chat: Mapping[str, Any], characters: int, media: PromptMedia | None = None) -> ChatPrompt:
    """Returns the prompt of a translated chat; ``media`` takes its images, which it may not have otherwise.

    Raises:
        BadRequest: a message has another content.
    """
    return ChatPrompt(
        chat["messages"],
        tools=chat.get("tools"),
        tool_choice=chat.get("tool_choice"),
        continue_final_message=bool(chat.get("continue_final_message")),
        options=chat.get("chat_template_kwargs"),
        reasoning_effort=chat.get("reasoning_effort"),
        characters=characters,
        media=media,
    )


def translated_chat(
    fields: RoutingFields,
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None,
    tool_choice: str | dict[str, Any] | None,
    reasoning_effort: str | None,
) -> dict[str, Any]:
    """Returns the fields of a chat that make its prompt."""
    chosen = given(tools=tools, tool_choice=tool_choice, reasoning_effort=reasoning_effort)
    return {"model": fields.model, "messages": messages} | chosen | copied(fields, *KEPT_FIELDS)


def given(**fields: Any) -> dict[str, Any]:
    """Returns the fields with a value."""
    return {name: value for name, value in fields.items() if value is not None}


def copied(fields: msgspec.Struct, *names: str) -> dict[str, Any]:
    """Returns those of the named fields that have a value."""
    return {name: value for name in names if (value := getattr(fields, name)) is not None}


def needed(text: Any, place: Place) -> str:
    """Returns a text.

    Raises:
        BadRequest: it is missing, or no text.
    """
    if not isinstance(text, str):
        raise invalid(place, "expected a text")
    return text


def needed_name(name: Any, place: Place) -> str:
    """Returns the name of the tool or function at a place.

    Raises:
        BadRequest: it is missing, empty, or no text.
    """
    return needed(name or None, (place, "name"))
