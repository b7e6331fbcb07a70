"""What routing needs of an OpenAI request body. Everything else is the engine's business."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import msgspec
from kvrouter.frontend.api.json_body import decode_json
from kvrouter.frontend.api.token_list import Prompt
from kvrouter.frontend.packed_prompt import TOKEN_BYTES
from kvrouter.runtime.errors import BadRequest

_TOKEN_LIST = re.compile(rb"\[\s*\d")


class _Fields(msgspec.Struct, frozen=True):
    model: str = ""
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    cache_salt: str | None = None
    priority: int | None = None


# As lenient as the engines: what they would refuse is for them to refuse.
_FIELDS = msgspec.json.Decoder(_Fields, strict=False)


@dataclass(frozen=True, slots=True)
class RoutedBody:
    """The parts of a request body that decide where it goes."""

    model: str
    """Name of the model or LoRA adapter; empty if the body names none."""
    token_ids: bytes = field(default=b"", repr=False)
    """Prompt as packed token ids. Of a text, each four bytes stand for a token: that is its typical length, and prompts
    with the same beginning have the same first blocks. No engine reports such blocks, so where workers publish events
    the request is routed on load; in approximate mode it follows its prefix."""
    is_text: bool = False
    """Whether the prompt was a text."""
    max_output_tokens: int = 0
    cache_salt: str = ""
    priority: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens; an estimate for a text."""
        return len(self.token_ids) // TOKEN_BYTES

    @classmethod
    def parse(cls, body: bytes | bytearray, *, max_prompt_tokens: int) -> RoutedBody:
        """Parses a JSON body.

        Raises:
            BadRequest: it is not a JSON object, or one of these fields has an impossible type.
            PromptTooLong: the prompt has more token ids than the limit.
        """
        fields = decode_json(_FIELDS, body)
        prompt = bytes(fields.prompt) or bytes(fields.messages)
        is_text = not _TOKEN_LIST.match(prompt)
        if is_text:
            tokens = max(1, min(len(prompt) // TOKEN_BYTES, max_prompt_tokens))
            token_ids = prompt.ljust(TOKEN_BYTES)[: tokens * TOKEN_BYTES]
        else:
            token_ids = Prompt.parse(prompt, limit=max_prompt_tokens).token_ids
        output = fields.max_completion_tokens or fields.max_tokens or 0
        priority = fields.priority or 0
        if not -(1 << 31) <= priority < 1 << 31:
            raise BadRequest("priority: out of range", field="priority", advice="Send an integer of 32 bits.")
        return cls(
            model=fields.model,
            token_ids=token_ids,
            is_text=is_text,
            max_output_tokens=max(0, min(output, (1 << 32) - 1)),
            cache_salt=fields.cache_salt or "",
            priority=priority,
        )
