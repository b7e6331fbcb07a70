"""The items of a response of OpenAI's Responses: each begins, grows and ends before the next one. Pure."""

from __future__ import annotations

from typing import Any

from kvrouter.frontend.edge.choice import Piece
from kvrouter.frontend.text.tool_calls import ToolCallPiece

Event = tuple[str, dict[str, Any]]
"""Name and fields of an event."""
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
"""Type of the only part of an item."""
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class OutputItems:
    """Turns pieces of an output into items, and the events of a stream that has them."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        """The items that have ended."""
        self.reasoning_tokens = 0
        self.finish_reason: str | None = None
        self._item: dict[str, Any] | None = None
        """The item that grows."""
        self._texts: list[str] = []
        self._request_id = ""

    def begin(self, request_id: str) -> None:
        """Sets the id of the request, from which items get theirs."""
        self._request_id = request_id

    def add(self, piece: Piece) -> list[Event]:
        """Adds a piece. Returns the events of a stream."""
        events: list[Event] = []
        if piece.reasoning:
            self.reasoning_tokens += len(piece.token_ids)
            self._enter("reasoning", {"summary": [], "content": []}, events)
            self._grow("response.reasoning_text.delta", piece.reasoning, events)
        if piece.text:
            self._enter("message", {"role": "assistant", "content": []}, events)
            self._grow("response.output_text.delta", piece.text, events)
        for call in piece.tool_calls:
            self._call(call, events)
        self.finish_reason = piece.finish_reason
        return events

    def end(self) -> list[Event]:
        """Ends the last item. Returns the events of a stream."""
        events: list[Event] = []
        self._leave(events, "incomplete" if self.finish_reason == "length" else "completed")
        return events

    def _call(self, call: ToolCallPiece, events: list[Event]) -> None:
        if call.name:
            self._leave(events)
            self._enter("function_call", {"call_id": call.id, "name": call.name, "arguments": ""}, events)
        if call.arguments:
            self._grow("response.function_call_arguments.delta", call.arguments, events)

    def _enter(self, kind: str, fields: dict[str, Any], events: list[Event]) -> None:
        """Begins an item unless one of its kind grows."""
        if self._item is not None and self._item["type"] == kind:
            return
        self._leave(events)
        item_id = f"{_PREFIXES[kind]}_{self._request_id}_{len(self.done)}"
        self._item = {"id": item_id, "type": kind, "status": "in_progress"} | fields
        events.append(("response.output_item.added", {"output_index": len(self.done), "item": dict(self._item)}))
        if kind in _PARTS:
            events.append(("response.content_part.added", self._place(kind) | {"part": _part(kind, "")}))

    def _grow(self, name: str, text: str, events: list[Event]) -> None:
        assert self._item is not None, "an item has begun"  # noqa: S101
        self._texts.append(text)
        fields = self._place(self._item["type"]) | {"delta": text}
        events.append((name, fields | {"logprobs": []} if self._item["type"] == "message" else fields))

    def _leave(self, events: list[Event], status: str = "completed") -> None:
        """Ends the item that grows."""
        item, text = self._item, "".join(self._texts)
        if item is None:
            return
        kind = item["type"]
        place = self._place(kind)
        if kind == "function_call":
            item["arguments"] = text
            events.append(("response.function_call_arguments.done", place | {"arguments": text, "name": item["name"]}))
        else:
            part = _part(kind, text)
            item["content"] = [part]
            extra: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            events.append((f"response.{_PARTS[kind]}.done", place | {"text": text} | extra))
            events.append(("response.content_part.done", place | {"part": part}))
        item["status"] = status
        events.append(("response.output_item.done", {"output_index": len(self.done), "item": item}))
        self.done.append(item)
        self._item = None
        self._texts.clear()

    def _place(self, kind: str) -> dict[str, Any]:
        assert self._item is not None, "an item has begun"  # noqa: S101
        place = {"item_id": self._item["id"], "output_index": len(self.done)}
        return place | {"content_index": 0} if kind in _PARTS else place


def _part(kind: str, text: str) -> dict[str, Any]:
    part = {"type": _PARTS[kind], "text": text}
    return part | {"annotations": [], "logprobs": []} if kind == "message" else part
