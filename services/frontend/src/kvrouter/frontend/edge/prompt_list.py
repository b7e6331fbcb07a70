"""Parses a prompt: a text, or a list of texts and lists of token ids.

Elements are parsed one by one, so a list of millions ends at the first too many.
"""

from __future__ import annotations

import re

import msgspec
from kvrouter.frontend.edge.request_fields import MAX_SEQUENCES
from kvrouter.frontend.edge.text_request import TextPrompt, TokenPrompt
from kvrouter.frontend.edge.token_list import ADVICE, Prompt
from kvrouter.frontend.text.model_text import PromptSource
from kvrouter.v1.errors import BadRequest

_STRING = re.compile(r'"(?:[^"\\]+|\\.)*+"', re.DOTALL)
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
        raise _invalid("prompt", "expected UTF-8") from None
    prompts: list[PromptSource] = []
    at = _after_space(text, text.index("[") + 1)
    while True:
        field = f"prompt.{len(prompts)}"
        if len(prompts) == MAX_SEQUENCES:
            raise _invalid("prompt", f"more than {MAX_SEQUENCES} prompts")
        if text[at : at + 1] == '"':
            end = _end_of_string(text, at, field)
            content = _text(text[at:end].encode(errors="surrogatepass"), field)
            prompts.append(TextPrompt(content, add_special_tokens=add_special_tokens, field=field))
        elif text[at : at + 1] == "[":
            end = text.find("]", at) + 1
            if not end:
                raise _invalid(field, "expected a list of token ids")
            prompts.append(_token_prompt(text[at:end].encode(), field, limit))
        else:
            raise _invalid(field, "expected a text or a list of token ids")
        at = _after_space(text, end)
        if text[at : at + 1] == "]" and _after_space(text, at + 1) == len(text):
            return prompts
        if text[at : at + 1] != ",":
            raise _invalid(field, "expected a comma or the end of the list after it")
        at = _after_space(text, at + 1)


def _token_prompt(raw: bytes, field: str, limit: int) -> TokenPrompt:
    try:
        prompt = Prompt.parse(raw, limit=limit)
    except BadRequest as error:
        path = f"{field}{error.info.field.removeprefix('prompt')}"
        raise _invalid(path, "expected an integer from 0 to 2^32 - 1") from None
    if not prompt.tokens:
        raise _invalid(field, "the prompt is empty")
    return TokenPrompt(prompt)


def _end_of_string(text: str, at: int, field: str) -> int:
    found = _STRING.match(text, at)
    if found is None:
        raise _invalid(field, "expected the end of the text")
    return found.end()


def _text(raw: bytes, field: str) -> str:
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _invalid(field, str(error)[:256]) from None


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _invalid(field: str, message: str) -> BadRequest:
    return BadRequest(f"{field}: {message}", field=field, advice=ADVICE)
