"""A chat or completion whose prompts are not tokenized yet, and its prompts: texts and lists of token ids.

Prompts of a list are parsed one by one, so a list of millions ends at the first too many.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

import msgspec
from kvrouter.frontend.edge.json_body import invalid
from kvrouter.frontend.edge.request_fields import MAX_SEQUENCES, Constraint, RouterConfigOverride, SharedFields
from kvrouter.frontend.edge.token_list import ADVICE, TokenPrompt
from kvrouter.frontend.generate_request import GenerateRequest, Sampling, StopRules
from kvrouter.frontend.text.client_work import Slices
from kvrouter.frontend.text.model_text import ModelText, PromptSource
from kvrouter.frontend.text.tool_calls import ToolUse
from kvrouter.v1.common_pb2 import BlockScope, RoutingConstraints, RoutingOverrides
from kvrouter.v1.errors import BadRequest
from msgspec.structs import asdict

_NO_OVERRIDE = RouterConfigOverride()


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


class TextRequest(msgspec.Struct, eq=False):
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
    constraint: Constraint | None = None
    """What constrains the output; None if nothing does."""

    @property
    def sequences(self) -> int:
        """Number of sequences for each prompt."""
        return 1 if self.fields.n is None else self.fields.n

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        options = self.fields.stream_options
        return options is not None and bool(options.include_usage)

    @property
    def plain_prompt(self) -> TokenPrompt | None:
        """The prompt of a completion that is one sequence of token ids after one prompt of them; None for others."""
        if self.is_chat or len(self.prompts) != 1 or self.echo or self.logprobs or self.constraint is not None:
            return None
        prompt, fields = self.prompts[0], self.fields
        is_plain = fields.n in (None, 1) and not fields.stop
        return prompt if is_plain and isinstance(prompt, TokenPrompt) else None

    def needs_text(self) -> str:
        """Returns the field needing a tokenizer; empty if none does."""
        if self.is_chat:
            return "messages"
        if self.fields.stop_strings():
            return "stop"
        if self.echo:
            return "echo"
        return next((each.field for each in self.prompts if not isinstance(each, TokenPrompt)), "")

    def generate_request(self, max_tokens: int) -> GenerateRequest:
        """Returns the request for one sequence, without the prompt."""
        fields = self.fields
        request = GenerateRequest(
            model=fields.model,
            stop=StopRules(
                max_tokens, fields.min_tokens or 0, bool(fields.ignore_eos), stop_token_ids=fields.stop_token_ids or ()
            ),
            request_id=fields.request_id or "",
            priority=fields.priority or 0,
            conversation_id=fields.conversation_id or "",
            sampling=self._sampling(),
            migration_limit=fields.migration_limit,
            expected_output_tokens=fields.expected_output_tokens,
        )
        if (override := fields.router_config_override) is not None and override != _NO_OVERRIDE:
            request.overrides = RoutingOverrides(**asdict(override))
        if fields.worker_id is not None or fields.dp_rank is not None:
            request.constraints = RoutingConstraints(worker_id=fields.worker_id, dp_rank=fields.dp_rank)
        if fields.cache_salt:
            request.scope = BlockScope(cache_salt=fields.cache_salt)
        return request

    def _sampling(self) -> Sampling:
        fields = self.fields
        return Sampling(
            temperature=fields.temperature,
            top_p=fields.top_p,
            top_k=None if fields.top_k is None else max(0, fields.top_k),  # vLLM's value for all tokens is -1.
            min_p=fields.min_p,
            frequency_penalty=fields.frequency_penalty,
            presence_penalty=fields.presence_penalty,
            repetition_penalty=fields.repetition_penalty,
            seed=fields.seed,
            logprobs=1 + self.top_logprobs if self.logprobs else None,
            structured_output=None if self.constraint is None else self.constraint[1],
        )


_STRING = re.compile(r'"(?:[^"\\]+|\\.)*+"', re.DOTALL)
_invalid_prompt = partial(invalid, advice=ADVICE)
_SPACE = re.compile(r"[ \t\r\n]*")


def parse_prompts(raw: bytes, *, add_special_tokens: bool, limit: int) -> list[PromptSource]:
    """Returns the prompts of a JSON value beginning with a text or a list of texts or lists.

    Args:
        raw: The value.
        add_special_tokens: Whether texts get the tokens the tokenizer adds to a prompt.
        limit: Maximum number of tokens of a prompt.

    Raises:
        BadRequest: it is something else, or has too many prompts; the error names the element.
        PromptTooLong: a list has more token ids than the limit.
    """
    if raw.lstrip()[:1] == b'"':
        return [TextPrompt(_text(raw, "prompt"), add_special_tokens=add_special_tokens, field="prompt")]
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise _invalid_prompt("prompt", "expected UTF-8") from None
    prompts: list[PromptSource] = []
    at = _after_space(text, text.index("[") + 1)
    while True:
        field = f"prompt.{len(prompts)}"
        if len(prompts) == MAX_SEQUENCES:
            raise _invalid_prompt("prompt", f"more than {MAX_SEQUENCES} prompts")
        if text[at : at + 1] == '"':
            end = _end_of_string(text, at, field)
            content = _text(text[at:end].encode(errors="surrogatepass"), field)
            prompts.append(TextPrompt(content, add_special_tokens=add_special_tokens, field=field))
        elif text[at : at + 1] == "[":
            end = text.find("]", at) + 1
            if not end:
                raise _invalid_prompt(field, "expected a list of token ids")
            prompts.append(_token_prompt(text[at:end].encode(), field, limit))
        else:
            raise _invalid_prompt(field, "expected a text or a list of token ids")
        at = _after_space(text, end)
        if text[at : at + 1] == "]" and _after_space(text, at + 1) == len(text):
            return prompts
        if text[at : at + 1] != ",":
            raise _invalid_prompt(field, "expected a comma or the end of the list after it")
        at = _after_space(text, at + 1)


def _token_prompt(raw: bytes, field: str, limit: int) -> TokenPrompt:
    try:
        prompt = TokenPrompt(raw, limit=limit)
    except BadRequest as error:
        path = f"{field}{error.info.field.removeprefix('prompt')}"
        raise _invalid_prompt(path, "expected an integer from 0 to 2^32 - 1") from None
    if not prompt.token_ids:
        raise _invalid_prompt(field, "the prompt is empty")
    return prompt


def _end_of_string(text: str, at: int, field: str) -> int:
    found = _STRING.match(text, at)
    if found is None:
        raise _invalid_prompt(field, "expected the end of the text")
    return found.end()


def _text(raw: bytes, field: str) -> str:
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _invalid_prompt(field, str(error)[:256]) from None


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()
