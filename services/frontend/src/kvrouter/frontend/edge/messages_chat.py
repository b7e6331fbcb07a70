"""The bodies of Anthropic's Messages, and their messages, tools and system blocks as those of a chat. Pure.

vLLM translates in the same way but for later system messages, so prompts have the same tokens on both ways and share
their caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
from kvrouter.frontend.edge.json_body import Place, check_parts, invalid
from kvrouter.frontend.edge.request_fields import Int32, OnlyDefault, UInt32
from kvrouter.frontend.edge.translated_request import RoutingFields, needed, needed_name


class Source(msgspec.Struct, frozen=True, gc=False):
    """The content of an image or document."""

    type: str | None = None
    url: str | None = None
    data: str | None = None
    media_type: str | None = None
    content: str | list[Block] | None = None


class Block(msgspec.Struct, frozen=True, gc=False):
    """A part of a content. Its type says which fields it has."""

    type: str
    text: str | None = None
    thinking: str | None = None
    source: str | Source | None = None
    title: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None


class Message(msgspec.Struct, frozen=True, gc=False):
    """A message of the conversation."""

    role: str
    content: str | list[Block]


class Tool(msgspec.Struct, frozen=True, gc=False):
    """A tool of the client or of Anthropic's servers. ``chat_tools`` checks the types of its fields.

    Many small tools take a fifth of the time of as many dictionaries, mostly that of the garbage collector.
    """

    type: Any = None
    name: Any = None
    description: Any = None
    input_schema: Any = None
    defer_loading: Any = None


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

    messages: list[Message]
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
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


_BILLING_HEADER = "x-anthropic-billing-header"
"""Beginning of a system block of Claude Code with a hash of the request: with it no two prompts share a prefix."""
_SEPARATOR = "\n\n"
_CUSTOM = (None, "custom")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "ctx": "user", "msg": "user"}
"""Roles of messages. Claude Code has two of its own."""


def chat_messages(fields: PromptFields, conversation: Conversation | None = None) -> list[dict[str, Any]]:
    """Returns the messages of the chat. ``conversation`` decides where system messages stand.

    Raises:
        BadRequest: a message or block is malformed, or of a kind that no chat has.
    """
    if not fields.messages:
        raise invalid("messages", "expected at least one message", "Send a message of the user.")
    check_parts(fields.messages, "messages", (each.content for each in fields.messages))
    conversation = conversation or Conversation()
    conversation.add_system(_system_text(fields.system, "system"))
    for index, message in enumerate(fields.messages):
        content, place = message.content, ("messages", index)
        role = _ROLES.get(message.role)
        if role is None:
            raise invalid((place, "role"), "expected user, assistant or system")
        if role == "system":
            conversation.add_system(_system_text(content, (place, "content")))
        elif isinstance(content, str):
            conversation.add({"role": role, "content": content})
        elif role == "user":
            _add_user(conversation, content, (place, "content"))
        else:
            conversation.add(_assistant(content, (place, "content")))
    return conversation.messages()


def chat_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Returns the tools of the chat; None if there are none.

    Raises:
        BadRequest: one is malformed, or runs on Anthropic's servers.
    """
    if not tools:
        return None
    check_parts(tools, "tools")
    functions = []
    for index, tool in enumerate(tools):
        place = ("tools", index)
        if tool.type not in _CUSTOM:
            raise invalid(
                (place, "type"),
                f"expected a tool of the client, received {str(tool.type)[:64]!r}",
                "Leave the tool out: it runs on Anthropic's own servers.",
            )
        function: dict[str, Any] = {"name": needed_name(tool.name, place)}
        schema = tool.input_schema
        if not isinstance(schema, dict):
            raise invalid((place, "input_schema"), "expected a JSON schema")
        if isinstance(tool.description, str):
            function["description"] = tool.description
        function["parameters"] = schema if "type" in schema else schema | {"type": "object"}
        if isinstance(tool.defer_loading, bool):
            function["defer_loading"] = tool.defer_loading
        functions.append({"type": "function", "function": function})
    return functions


def chat_tool_choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    """Returns the choice of the chat.

    Raises:
        BadRequest: it is of an unknown type, or names no tool.
    """
    if choice is None:
        return None
    if choice.type == "tool" and choice.name:
        return {"type": "function", "function": {"name": choice.name}}
    if choice.type not in _CHOICES:
        raise invalid("tool_choice", "expected auto, any, none, or tool with a name")
    return _CHOICES[choice.type]


class Conversation:
    """Messages of a chat, to whose begin and neighbours system messages are added.

    Agents add system messages late in a conversation. At its begin they would change the prefix of all earlier turns,
    and many templates take none elsewhere, so each becomes a part of the user's message beside it.
    """

    def __init__(self) -> None:
        self._leading: list[str] = []
        self._late: list[str] = []
        """System texts after the last message."""
        self._messages: list[dict[str, Any]] = []

    def add_system(self, text: str) -> None:
        """Adds a system message."""
        if text:
            (self._late if self._messages else self._leading).append(text)

    def add(self, message: dict[str, Any]) -> None:
        """Adds a message of the user, of the model or of a tool."""
        if self._late and not self._joins_last():
            role = message["role"]
            if role == "user":
                _add_text(message, self._late_text(), at_end=False)
            elif role == "assistant":
                self._messages.append({"role": "user", "content": self._late_text()})
        self._messages.append(message)  # Results of tools follow their calls at once; the texts join the last one.

    def messages(self) -> list[dict[str, Any]]:
        """Returns all messages."""
        if self._late and not self._joins_last():
            self._messages.append({"role": "user", "content": self._late_text()})
        system = [{"role": "system", "content": _SEPARATOR.join(self._leading)}] if self._leading else []
        return system + self._messages

    def _joins_last(self) -> bool:
        """Adds the late texts to the last message, unless it is the model's. Returns whether it did."""
        last = self._messages[-1]
        if last["role"] == "assistant":
            return False
        _add_text(last, self._late_text(), at_end=True)
        return True

    def _late_text(self) -> str:
        text = _SEPARATOR.join(self._late)
        self._late.clear()
        return text


class EngineConversation(Conversation):
    """The same as vLLM makes it: later system messages stay where they are, or all of them are the first message."""

    def __init__(self, *, stays: bool) -> None:
        """``stays``: whether the template takes system messages anywhere."""
        super().__init__()
        self._stays = stays
        self._has_begun = False

    def add_system(self, text: str) -> None:
        """Adds a system message; the first call adds that of the body's own field."""
        if text and self._stays and self._has_begun:
            self._messages.append({"role": "system", "content": text})
        elif text:
            self._leading.append(text)
        self._has_begun = True

    def messages(self) -> list[dict[str, Any]]:
        """Returns all messages."""
        system = [{"role": "system", "content": "".join(self._leading)}] if self._leading else []
        return system + self._messages


def _system_text(content: str | Sequence[Block] | None, place: Place) -> str:
    if content is None or isinstance(content, str):
        return "" if (content or "").startswith(_BILLING_HEADER) else content or ""
    return "".join(text for text in _texts(content, place) if not text.startswith(_BILLING_HEADER))


def _add_user(conversation: Conversation, blocks: Sequence[Block], place: Place) -> None:
    """Adds a message of the user. The results of tools are messages of their own, before the rest of it."""
    parts: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        if block.type == "tool_result":
            _add_result(conversation, block, (place, index))
        else:
            parts += _parts(block, (place, index))
    if content := _content(parts):
        conversation.add({"role": "user", "content": content})


def _add_result(conversation: Conversation, block: Block, place: Place) -> None:
    call_id, content = needed(block.tool_use_id, (place, "tool_use_id")), block.content
    parts: list[dict[str, Any]] = []
    if isinstance(content, list):
        for index, each in enumerate(content):
            parts += _parts(each, ((place, "content"), index))
        content = "\n".join([part["text"] for part in parts if part["type"] == "text"])
    conversation.add({"role": "tool", "tool_call_id": call_id, "content": content or ""})
    if images := [part for part in parts if part["type"] != "text"]:
        conversation.add({"role": "user", "content": images})


def _assistant(blocks: Sequence[Block], place: Place) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    parts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        match block.type:
            case "thinking":
                thoughts.append(needed(block.thinking, ((place, index), "thinking")))
            case "redacted_thinking":
                continue  # Nobody but Anthropic can read it.
            case "tool_use":
                calls.append(_call(block, (place, index)))
            case _:
                parts += _parts(block, (place, index))
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if content := _content(parts):
        message["content"] = content
    return message


def _call(block: Block, place: Place) -> dict[str, Any]:
    if block.input is None:
        raise invalid((place, "input"), "expected an object")
    # With the spaces that models write, which some templates show.
    arguments = msgspec.json.format(msgspec.json.encode(block.input), indent=0).decode()
    function = {"name": needed_name(block.name, place), "arguments": arguments}
    return {"id": needed(block.id, (place, "id")), "type": "function", "function": function}


def _parts(block: Block, place: Place) -> list[dict[str, Any]]:
    """Returns a block as parts of a chat's content."""
    reader = _READERS.get(block.type)
    if reader is None:
        message = f"a block of type {block.type[:64]!r} cannot be translated to a chat"
        raise invalid(place, message, "Leave the block out.")
    return reader(block, place)


def _text_part(block: Block, place: Place) -> list[dict[str, Any]]:
    text = needed(block.text, (place, "text"))
    return [{"type": "text", "text": text}] if text else []


def _image_part(block: Block, place: Place) -> list[dict[str, Any]]:
    source = block.source
    if isinstance(source, Source):
        if source.type == "url" and source.url is not None:
            return [{"type": "image_url", "image_url": {"url": source.url}}]
        if source.type == "base64" and source.data is not None:
            return [{"type": "image_url", "image_url": {"url": f"data:{source.media_type};base64,{source.data}"}}]
    raise invalid((place, "source"), "expected an image as base64 or a URL")


def _document_parts(block: Block, place: Place) -> list[dict[str, Any]]:
    source, place = block.source, (place, "source")
    if isinstance(source, Source) and source.type == "text":
        return [{"type": "text", "text": needed(source.data, (place, "data"))}]
    if isinstance(source, Source) and source.type == "content":
        content = source.content
        texts = [content] if isinstance(content, str) else _texts(content or (), (place, "content"))
        return [{"type": "text", "text": each} for each in texts if each]
    raise invalid(place, "expected a text", "Send the text of the document.")


def _search_parts(block: Block, place: Place) -> list[dict[str, Any]]:
    if not isinstance(block.content, list):
        raise invalid((place, "content"), "expected a list of text blocks")
    head = [each for each in (block.title, block.source) if each and isinstance(each, str)]
    return [{"type": "text", "text": "\n".join([*head, *_texts(block.content, (place, "content"))])}]


def _texts(blocks: Sequence[Block], place: Place) -> list[str]:
    return [needed(block.text, ((place, index), "text")) for index, block in enumerate(blocks)]


_READERS: dict[str, Callable[[Block, Place], list[dict[str, Any]]]] = {
    "text": _text_part,
    "image": _image_part,
    "document": _document_parts,
    "search_result": _search_parts,
}


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _add_text(message: dict[str, Any], text: str, *, at_end: bool) -> None:
    content = message["content"]
    if isinstance(content, str):
        message["content"] = _joined(content, text) if at_end else _joined(text, content)
        return
    place = -1 if at_end else 0
    if content[place]["type"] == "text":
        own = content[place]["text"]
        content[place] = {"type": "text", "text": _joined(own, text) if at_end else _joined(text, own)}
    else:
        content.insert(len(content) if at_end else 0, {"type": "text", "text": text})


def _joined(before: str, after: str) -> str:
    return f"{before}{_SEPARATOR}{after}" if before else after
