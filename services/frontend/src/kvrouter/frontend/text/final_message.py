"""Cuts a rendered chat within its final message, so the model continues this message.

A mark at the end of the message's text is rendered with it, and the prompt ends there, as in ``transformers``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from kvrouter.v1.errors import BadRequest

_FIELD = "continue_final_message"


def marked(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Returns messages whose last text ends with a mark, and the mark, which no client can know.

    Raises:
        BadRequest: the final message has no text.
    """
    *earlier, final = messages
    mark = f"<{uuid4().hex}> "
    content = final["content"]
    if isinstance(content, str):
        return [*earlier, {**final, "content": content + mark}], mark
    place = next((place for place in reversed(range(len(content))) if "text" in content[place]), None)
    if place is None:
        raise _refused("the final message has no text")
    part = content[place]
    parts = [*content[:place], {**part, "text": part["text"] + mark}, *content[place + 1 :]]
    return [*earlier, {**final, "content": parts}], mark


def until_mark(rendered: str, mark: str) -> str:
    """Returns the rendered chat up to the mark. Spaces before it are removed if the template removes those after it.

    Raises:
        BadRequest: the template has not rendered the message.
    """
    at = rendered.rfind(mark.strip())
    if at < 0:
        raise _refused("the chat template does not render the final message as it is")
    until = rendered[:at]
    return until if rendered.startswith(mark, at) else until.rstrip()


def _refused(message: str) -> BadRequest:
    return BadRequest(f"{_FIELD}: {message}", field=_FIELD, advice="Send it with a final message of text only.")
