"""Turns output tokens into text as they arrive, up to a stop string, and separates the reasoning in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

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


class StopStrings:
    """Passes text on until one of the stop strings occurs. Text that may begin a stop string waits for more."""

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        """``include`` says whether the text passed on ends with the stop string."""
        self._stop = tuple(stop)
        self._include = include
        self._waiting = ""
        self.matched: str | None = None
        """The stop string that occurred."""

    def feed(self, text: str) -> str:
        """Returns the text that can be passed on. After a match there is no more."""
        if self.matched is not None:
            return ""
        if not self._stop:
            return text
        self._waiting += text
        first = min(
            ((place, -len(stop), stop) for stop in self._stop if (place := self._waiting.find(stop)) >= 0), default=None
        )
        if first is not None:
            place, _, self.matched = first
            passed = self._waiting[: place + len(self.matched) if self._include else place]
            self._waiting = ""
            return passed
        keep = self._may_begin()
        passed, self._waiting = self._waiting[: len(self._waiting) - keep], self._waiting[len(self._waiting) - keep :]
        return passed

    def end(self) -> str:
        """Returns the text that waited, since nothing follows."""
        waiting, self._waiting = self._waiting, ""
        return waiting

    def _may_begin(self) -> int:
        """Returns the length of the longest end of the text that is the begin of a stop string."""
        longest = max(len(stop) for stop in self._stop) - 1
        for length in range(min(longest, len(self._waiting)), 0, -1):
            end = self._waiting[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0


ReasoningFormatName = Literal["deepseek_r1", "qwen3", "mistral", "none"]
"""Names of the formats, as vLLM's ``--reasoning-parser`` has them; ``none`` separates nothing."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks reasoning. Both marks may be special tokens."""

    begin: str
    end: str

    def is_open(self, prompt: str) -> bool:
        """Returns whether reasoning has begun and not ended at the end of a prompt."""
        return prompt.rfind(self.begin) > prompt.rfind(self.end)


_THINK = ReasoningFormat("<think>", "</think>")
_FORMATS: dict[str, ReasoningFormat] = {
    "deepseek_r1": _THINK,
    "qwen3": _THINK,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}


def reasoning_format(name: str | None) -> ReasoningFormat | None:
    """Returns the format of that name; None if there is none."""
    return _FORMATS.get(name or "")


class ReasoningParser:
    """Separates the reasoning of one output, which is at its begin, from its answer. The marks belong to neither."""

    def __init__(self, form: ReasoningFormat, *, is_open: bool) -> None:
        """``is_open`` says whether the prompt ends within reasoning, as templates of some models end it."""
        self._format = form
        self._waiting = ""
        self._is_reasoning = is_open
        self._has_answer = False

    def feed(self, text: str) -> tuple[str, str]:
        """Adds text of the output. Returns the reasoning and the answer in it."""
        if self._has_answer:
            return "", text
        self._waiting += text
        if not self._is_reasoning and not self._begins():
            return "", self._rest() if self._has_answer else ""
        reasoning, found, answer = self._waiting.partition(self._format.end)
        if found:
            self._waiting, self._has_answer = "", True
            return reasoning, answer
        end = self._format.end
        keep = next((size for size in range(len(end) - 1, 0, -1) if reasoning.endswith(end[:size])), 0)
        self._waiting = reasoning[len(reasoning) - keep :]
        return reasoning[: len(reasoning) - keep], ""

    def end(self) -> tuple[str, str]:
        """Ends the output. Returns the rest of the reasoning and of the answer."""
        rest = self._rest()
        return (rest, "") if self._is_reasoning and not self._has_answer else ("", rest)

    def _begins(self) -> bool:
        """Returns whether reasoning begins. Without its mark the whole output is the answer."""
        begin, text = self._format.begin, self._waiting.lstrip()
        if text.startswith(begin):
            self._waiting, self._is_reasoning = text.removeprefix(begin), True
        else:
            self._has_answer = not begin.startswith(text)
        return self._is_reasoning

    def _rest(self) -> str:
        rest, self._waiting = self._waiting, ""
        return rest
