"""Reads and writes token ids as JSON, between the text and a packed buffer: no Python number for each token.

A packed buffer has 4 bytes for each token, little-endian.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from kvrouter.core import NotATokenId, TokenBuffer, tokens_from_json, tokens_to_json
from kvrouter.runtime.errors import BadRequest, PromptTooLong

TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]

TOKEN_BYTES = 4

_PIECE_BYTES = 64 << 10
_NO_TOKENIZER = "Send the prompt as a list of token ids; the gateway has no tokenizer."


def parse_token_ids(text: msgspec.Raw, *, limit: int) -> bytes:
    """Parses a JSON array of token ids. Returns them as a packed buffer.

    Args:
        text: Well-formed JSON.
        limit: Maximum number of tokens; parsing stops beyond it.

    Raises:
        BadRequest: it is not an array, or an element is not a token id; the error has the element's index.
        PromptTooLong: there are more tokens than the limit.
    """
    with memoryview(text) as view:
        if not view or view[0] != ord("["):
            raise BadRequest("prompt: expected an array of token ids", field="prompt", advice=_NO_TOKENIZER)
        try:
            tokens = tokens_from_json(view, limit)
        except NotATokenId as error:
            field = f"prompt.{error.index}"
            message = f"{field}: expected an integer from 0 to 2^32 - 1"
            raise BadRequest(message, field=field, advice=_NO_TOKENIZER) from None
        if len(tokens) > limit * TOKEN_BYTES:
            raise PromptTooLong(_count(view), limit, field="prompt")
    return tokens


def encode_token_ids(tokens: TokenBuffer) -> msgspec.Raw:
    """Returns token ids as a JSON array."""
    return msgspec.Raw(tokens_to_json(tokens))


def _count(view: memoryview) -> int:
    commas = (bytes(view[start : start + _PIECE_BYTES]).count(b",") for start in range(0, len(view), _PIECE_BYTES))
    return 1 + sum(commas)
