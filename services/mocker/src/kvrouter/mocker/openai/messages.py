"""Anthropic's ``/v1/messages`` as vLLM and SGLang serve it: a chat within, a message to the client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
from kvrouter.mocker.openai.bodies import ChatBody, Message, TextPart
from kvrouter.mocker.openai.responses import Responses
from kvrouter.mocker.serving.generations import Piece
from kvrouter.mocker.serving.http_responses import event

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class _Block(msgspec.Struct):
    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    tool_use_id: str = ""
    input: dict[str, Any] | None = None
    content: str | list[TextPart] | None = None
    source: dict[str, Any] | None = None

    @property
    def result(self) -> str:
        """The text a tool has returned."""
        return "\n".join(each.text for each in self.content) if isinstance(self.content, list) else self.content or ""


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Block]


class _Choice(msgspec.Struct):
    type: str
    name: str = ""


class MessagesBody(msgspec.Struct, kw_only=True):
    """The body. Fields that are not listed are ignored, as by both engines."""

    model: str
    messages: list[_Message]
    max_tokens: int
    system: str | list[_Block] | None = None
    stream: bool | None = False
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: _Choice | None = None
    kv_transfer_params: dict[str, Any] | None = None

    def to_chat(self) -> ChatBody:
        """Returns the chat the engine runs."""
        system = self.system or ""
        if not isinstance(system, str):
            system = "".join(each.text for each in system if not each.text.startswith("x-anthropic-billing-header"))
        messages = [Message("system", system)] if system else []
        for message in self.messages:
            messages += _chat_messages(message)
        tools = [
            {"type": "function", "function": {"name": tool["name"], "parameters": tool.get("input_schema")}}
            for tool in self.tools or []
        ]
        return ChatBody(
            model=self.model,
            messages=messages,
            max_tokens=self.max_tokens,
            stream=self.stream,
            stop=self.stop_sequences,
            temperature=self.temperature,
            tools=tools or None,
            tool_choice=_tool_choice(self.tool_choice),
            kv_transfer_params=self.kv_transfer_params,
        )


class MessageResponses(Responses):
    """Builds the responses to one message."""

    ends_with = b""

    def whole(self) -> dict[str, Any]:
        """Returns the message as a whole."""
        chat = super().whole()
        (choice,) = chat["choices"]
        message = choice["message"]
        content = [{"type": "text", "text": message["content"]}] if message.get("content") else []
        for call in message.get("tool_calls", ()):
            function = call["function"]
            arguments = json.loads(function["arguments"])
            content.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
        return self._message(chat, content) | _ending(choice["finish_reason"]) | {"usage": _usage(chat["usage"])}

    def chunks(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """Yields the events of the stream for a piece, which is added."""
        for chunk in super().chunks(index, piece):
            choice = chunk["choices"][0]
            if choice["delta"].get("role"):
                empty = self._message(chunk, []) | _ending(None) | {"usage": _usage(self.usage())}
                yield {"type": "message_start", "message": empty}
                continue
            yield from self._events(choice["delta"])
            if choice["finish_reason"] is not None:
                yield {"type": "content_block_stop", "index": 0}
                usage = _usage(self.usage())
                yield {"type": "message_delta", "delta": _ending(choice["finish_reason"]), "usage": usage}
                yield {"type": "message_stop"}

    def encoded(self, chunk: dict[str, Any]) -> bytes:
        """Returns an event with its name."""
        return b"event: %b\n" % chunk["type"].encode() + event(chunk)

    def _events(self, delta: dict[str, Any]) -> Iterator[dict[str, Any]]:
        calls = delta.get("tool_calls") or [None]
        block: dict[str, Any]
        for call in calls:
            if call is None:
                block, grown = {"type": "text", "text": ""}, {"type": "text_delta", "text": delta["content"]}
            else:
                arguments = call["function"]["arguments"]
                block = {"type": "tool_use", "id": call.get("id"), "name": call["function"].get("name"), "input": {}}
                grown = {"type": "input_json_delta", "partial_json": arguments}
            if not self._has_block:
                self._has_block = True
                yield {"type": "content_block_start", "index": 0, "content_block": block}
            yield {"type": "content_block_delta", "index": 0, "delta": grown}

    _has_block = False

    def _message(self, chat: dict[str, Any], content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": chat["id"], "type": "message", "role": "assistant", "model": chat["model"], "content": content}


def _chat_messages(message: _Message) -> Iterator[Message]:
    """Yields the messages of a chat for one: results of tools are messages of their own, before the rest."""
    if isinstance(message.content, str):
        yield Message(message.role, message.content)
        return
    yield from (Message("tool", each.result) for each in message.content if each.type == "tool_result")
    rest = [_part(each) for each in message.content if each.type in ("text", "image")]
    if rest or message.role == "assistant":
        yield Message(message.role, rest[0].text if len(rest) == 1 and rest[0].type == "text" else rest)


def _part(block: _Block) -> TextPart:
    if block.type == "text":
        return TextPart("text", block.text)
    source = block.source or {}
    url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
    return TextPart("image_url", image_url={"url": url})


def _tool_choice(choice: _Choice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"any": "required"}.get(choice.type, choice.type)


def _ending(reason: str | None) -> dict[str, Any]:
    return {"stop_reason": None if reason is None else _STOP_REASONS[reason], "stop_sequence": None}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    return {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
