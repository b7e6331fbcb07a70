"""Turns output tokens into text as they arrive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

PROMPT_TOKENS = 6
"""Tokens at the end of a prompt deciding how the text of the output begins, for example with a space."""


class Detokenizer:
    """The text of one output. A character whose bytes are in several tokens appears with the last of them."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_end: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        shown: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Starts after the last tokens of the prompt. ``shown`` has the text of special tokens not skipped."""
        self._shown = shown
        self._tokenizer = tokenizer
        self._vocabulary_size = tokenizer.get_vocab_size()
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(
            ids=[token for token in prompt_end if token < self._vocabulary_size],
            skip_special_tokens=skip_special_tokens,
        )

    def feed(self, token_ids: Iterable[int]) -> str:
        """Returns the text that is complete with these tokens. Tokens the tokenizer does not know have none."""
        return "".join(self.text_of(token) for token in token_ids)

    def text_of(self, token: int) -> str:
        """Returns the text that is complete with this token."""
        if token >= self._vocabulary_size:
            return ""
        if token in self._shown:
            return self._shown[token]
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception:
            # The library gives up on sequences that no text has, such as bytes that are no UTF-8. Begin anew.
            self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
            return self._stream.step(self._tokenizer, token) or ""
