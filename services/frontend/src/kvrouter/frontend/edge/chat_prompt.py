"""The prompt of a chat: its messages, rendered with the model's template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvrouter.frontend.edge.chat_messages import (
    as_engine_renders,
    template_messages,
    with_parts,
    with_text_content,
)
from kvrouter.frontend.text.client_work import Slices
from kvrouter.frontend.text.final_message import marked, until_mark
from kvrouter.frontend.text.model_text import ModelText
from kvrouter.v1.errors import BadRequest

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


class ChatPrompt:
    """The prompt of a chat, not rendered yet."""

    field = "messages"

    def __init__(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: object = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        characters: int,
    ) -> None:
        """Takes fields of a body.

        Args:
            messages: The messages.
            tools: The tools.
            tool_choice: Which of them are called, and so, with some engines, which the template describes.
            documents: Documents the template may use.
            add_generation_prompt: Whether the prompt ends with the begin of the model's message. By default it does,
                unless the final message is continued.
            continue_final_message: Whether the prompt ends within the final message.
            options: Further variables for the template.
            reasoning_effort: One more variable.
            characters: Size of the chat.

        Raises:
            BadRequest: a message is no message of text, or fields contradict each other, or an option is reserved.
        """
        if continue_final_message and add_generation_prompt:
            raise BadRequest(
                "continue_final_message: add_generation_prompt is true too",
                field="continue_final_message",
                advice="Set add_generation_prompt to false, or leave it out.",
            )
        variables = dict(options or {})
        if reasoning_effort is not None:
            variables.setdefault("reasoning_effort", reasoning_effort)
        for name in variables.keys() & _RESERVED:
            raise BadRequest(
                f"chat_template_kwargs.{name}: set by the request itself",
                field=f"chat_template_kwargs.{name}",
                advice="Leave it out.",
            )
        self.characters = characters
        self._messages = template_messages(messages)
        self._tools = tools or ()
        self._tool_choice = tool_choice
        self._documents = documents
        self._continues = continue_final_message
        self._begins = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        self._options = variables

    def slices(self, text: ModelText | None, limit: int) -> Slices[bytes]:
        """Renders the chat with the model's template and tokenizes it, in slices, and returns its tokens.

        Raises:
            BadRequest: the model has no template, or its template does not take the chat.
            PromptTooLong: there are more tokens than the limit.
        """
        assert text is not None, "a chat is rendered only for a model with a tokenizer"  # noqa: S101
        template = text.template
        if template is None:
            raise BadRequest(
                f"the model has no chat template: {text.no_template}",
                field="messages",
                advice="Send a prompt to /v1/completions.",
            )
        rule, mark = text.chat_rule, ""
        messages = as_engine_renders(self._messages, rule, continues=self._continues)
        if not template.takes_parts:
            messages = [with_text_content(message, rule.part_separator) for message in messages]
        elif not template.takes_text:
            messages = list(map(with_parts, messages))
        if self._continues:
            messages, mark = marked(messages)
        rendered = yield from template.rendering(
            messages,
            tools=rule.tools(self._tools, self._tool_choice),
            documents=self._documents,
            add_generation_prompt=self._begins,
            options=self._options,
        )
        if mark:
            rendered = until_mark(rendered, mark)
        # The template has written the special tokens that the tokenizer would add.
        yield
        return (yield from text.tokenizer.encode(rendered, special_tokens=False, limit=limit, field="messages"))

    def tokens_at_once(self, text: ModelText, limit: int) -> bytes | None:  # noqa: ARG002
        """Returns None: a template may take long."""
        return None
