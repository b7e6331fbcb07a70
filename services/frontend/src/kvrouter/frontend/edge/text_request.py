"""A chat or completion whose prompts are not tokenized yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrouter.frontend.edge.request_fields import SharedFields
from kvrouter.frontend.edge.token_list import Prompt
from kvrouter.frontend.text.client_work import Slices
from kvrouter.frontend.text.model_text import ModelText, PromptSource
from kvrouter.frontend.text.tool_calls import ToolUse


class TokenPrompt:
    """A prompt of token ids."""

    field = "prompt"
    characters = 0

    def __init__(self, prompt: Prompt) -> None:
        self.as_json = prompt.as_json
        self._token_ids = prompt.token_ids

    def slices(self, text: ModelText | None, limit: int) -> Slices[bytes]:
        """Returns the token ids."""
        return self.tokens_at_once(text, limit)
        yield

    def tokens_at_once(self, text: ModelText | None, limit: int) -> bytes:  # noqa: ARG002
        """Returns the token ids."""
        return self._token_ids


class TextPrompt:
    """A prompt that is a text."""

    def __init__(self, text: str, *, add_special_tokens: bool, field: str) -> None:
        self.field = field
        self.characters = len(text)
        self.text = text
        self._add_special_tokens = add_special_tokens

    def slices(self, text: ModelText | None, limit: int) -> Slices[bytes]:
        """Tokenizes the text in slices, and returns its tokens."""
        assert text is not None, "a text is tokenized only for a model with a tokenizer"  # noqa: S101
        return text.tokenizer.encode(self.text, special_tokens=self._add_special_tokens, limit=limit, field=self.field)

    def tokens_at_once(self, text: ModelText, limit: int) -> bytes | None:
        """Returns the tokens of the text if nearly all of its words are known; otherwise None."""
        special = self._add_special_tokens
        return text.tokenizer.encode_at_once(self.text, special_tokens=special, limit=limit, field=self.field)


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A chat or completion, parsed."""

    fields: SharedFields
    prompts: Sequence[PromptSource]
    max_tokens: int | None
    """Maximum number of output tokens of a sequence; None for the rest of the model's length."""
    is_chat: bool
    echo: bool = False
    logprobs: bool = False
    """Whether the log probability of each token is returned."""
    top_logprobs: int = 0
    """Number of most likely tokens to return at the place of each token."""

    tools: ToolUse | None = None
    """Which tool calls the output may have; None if none is looked for."""
    continues_message: bool = False
    """Whether the output continues the final message of a chat."""
    includes_reasoning: bool = True
    """Whether the response has the reasoning, where it is separated from the answer."""

    @property
    def sequences(self) -> int:
        """Number of sequences for each prompt."""
        return 1 if self.fields.n is None else self.fields.n

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        options = self.fields.stream_options
        return options is not None and bool(options.include_usage)

    def needs_text(self) -> str:
        """Returns the field needing a tokenizer; empty if none does."""
        if self.is_chat:
            return "messages"
        if self.fields.stop_strings():
            return "stop"
        if self.echo:
            return "echo"
        return next((each.field for each in self.prompts if not isinstance(each, TokenPrompt)), "")
