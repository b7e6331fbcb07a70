"""What a simulated model writes on purpose: constrained output, a call of a tool, reasoning before an answer.

Prompts are read by the tokens that mark their parts in chat templates like that of Qwen: ``<|im_start|>``, ``<tools>``
and ``<think>``. A tokenizer without them has constrained output only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from kvrouter.mocker.constrained.constraint import Constraint, parse_schema
from kvrouter.mocker.constrained.errors import Unsupported
from kvrouter.mocker.constrained.instance import draw_instance, draw_word
from kvrouter.mocker.tools import asked_tool
from kvrouter.net.model_files import TOKENIZER
from kvrouter.v1.worker_pb2 import StructuredOutput, WorkerServiceGenerateRequest
from tokenizers import Tokenizer

_MARK_TOKENS = 4
"""Tokens at the end of a prompt among which is the mark that begins reasoning."""
_WORDS = 24
"""Words of a reasoning, and of the answer after it."""


class Answers:
    """The outputs of one model that are not drawn token by token."""

    def __init__(self, directory: str) -> None:
        """Loads the tokenizer of a directory, which takes up to seconds."""
        self._tokenizer = Tokenizer.from_file(str(Path(directory) / TOKENIZER))
        find = self._tokenizer.token_to_id
        self._message, self._tools, self._tools_end = find("<|im_start|>"), find("<tools>"), find("</tools>")
        self._reasoning = find("<think>")

    def answer(self, request: WorkerServiceGenerateRequest) -> tuple[int, ...]:
        """Returns the token ids of the output to a request; none if they are to be drawn.

        Raises:
            Unsupported: the output cannot be constrained so.
        """
        sampling = request.sampling_options
        seed = str(sampling.seed) if "seed" in sampling else request.request_id
        if "structured_output" in sampling:
            return self._encoded(constraint_of(sampling.structured_output).draw(seed))
        if request.stop_conditions.ignore_eos:
            return ()
        prompt = request.token_ids
        if (tool := self._asked_tool(prompt)) is not None:
            call = {"name": tool["name"], "arguments": draw_instance(tool.get("parameters") or {}, Random(seed))}
            return self._encoded(f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>")
        if self._reasoning is not None and self._reasoning in prompt[-_MARK_TOKENS:]:
            random = Random(seed)
            thought, answer = (" ".join(draw_word(random) for _ in range(_WORDS)) for _ in range(2))
            return self._encoded(f"{thought}\n</think>\n\n{answer}")
        return ()

    def _encoded(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _asked_tool(self, prompt: Sequence[int]) -> Mapping[str, Any] | None:
        """Returns the tool of the prompt that its last message is about, if the user wrote that; None for none."""
        if self._tools is None or self._tools_end is None or self._message is None:
            return None
        token_ids = list(prompt)
        if self._tools not in token_ids or token_ids.count(self._message) < 2:
            return None
        last = _last(token_ids, self._message)
        asked = self._tokenizer.decode(token_ids[_last(token_ids[:last], self._message) + 1 : last])
        role, _, text = asked.partition("\n")
        begin, end = token_ids.index(self._tools), token_ids.index(self._tools_end)
        if role.strip() != "user":
            return None
        return asked_tool(text, _tools(self._tokenizer.decode(token_ids[begin + 1 : end])))


def constraint_of(structured: StructuredOutput) -> Constraint:
    """Returns the constraint of a request.

    Raises:
        Unsupported: it is a grammar, or its schema is not JSON.
    """
    match structured.WhichOneof("constraint"):
        case "json_schema":
            return Constraint(schema=parse_schema(structured.json_schema))
        case "regex":
            return Constraint(regex=structured.regex)
        case "choice":
            return Constraint(choice=structured.choice.texts)
        case "json_object":
            return Constraint()
        case _:
            raise Unsupported("the simulated engine does not know grammars")


def _last(token_ids: Sequence[int], token: int) -> int:
    return len(token_ids) - 1 - token_ids[::-1].index(token)


def _tools(text: str) -> list[Mapping[str, Any]]:
    """Returns the functions of a template's list of tools, JSON objects with white space between them."""
    found: list[Mapping[str, Any]] = []
    decoder, text = json.JSONDecoder(), text.strip()
    while text:
        try:
            tool, end = decoder.raw_decode(text)
        except ValueError:
            break
        text = text[end:].strip()
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and "name" in function:
            found.append(function)
    return found
