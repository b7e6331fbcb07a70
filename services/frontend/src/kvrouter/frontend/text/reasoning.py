"""Separates the reasoning of a model's output from its answer as the output arrives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
