"""Reads and writes token ids as JSON, between the text and a packed buffer: no Python number for each token.

A packed buffer has 4 bytes for each token, little-endian.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from kvrouter.core import NotATokenId, TokenBuffer, tokens_from_json, tokens_to_json
from kvrouter.frontend.edge.json_body import invalid
from kvrouter.frontend.packed_prompt import TOKEN_BYTES
from kvrouter.frontend.text.client_work import Slices
from kvrouter.frontend.text.model_text import ModelText
from kvrouter.v1.errors import PromptTooLong

TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]

_LONGEST = 12
"""Bytes of the longest token id with a comma and a space."""

ADVICE = "Send a text, a list of token ids, or a list of these."
"""Advice about an invalid prompt. Whether a model takes texts is checked elsewhere."""


class TokenPrompt:
    """A prompt of token ids."""

    characters = 0

    def __init__(self, text: bytes | memoryview, *, limit: int, field: str = "prompt") -> None:
        """Parses a JSON array of token ids.

        Args:
            text: JSON.
            limit: Maximum number of tokens; parsing stops beyond it.
            field: Field of the request with the array, for errors.

        Raises:
            BadRequest: it is not an array, or an element is not a token id; the error has the element's index.
            PromptTooLong: there are more tokens than the limit.
        """
        if text[:1] != b"[":
            raise invalid(field, "expected a text or a list", ADVICE)
        try:
            token_ids = tokens_from_json(text, limit)
        except NotATokenId as error:
            raise invalid(f"{field}.{error.index}", "expected an integer from 0 to 2^32 - 1", ADVICE) from None
        if len(token_ids) > limit * TOKEN_BYTES:
            raise PromptTooLong(1 + bytes(text).count(b","), limit, field=field)
        self.field = field
        self.token_ids = token_ids
        """Packed buffer."""
        # White space without end would be kept and sent.
        self._text = text if len(text) <= 2 + _LONGEST * len(token_ids) // TOKEN_BYTES else b""

    def slices(self, text: ModelText | None, limit: int) -> Slices[bytes]:
        """Returns the token ids."""
        return self.tokens_at_once(text, limit)
        yield

    def tokens_at_once(self, text: ModelText | None, limit: int) -> bytes:  # noqa: ARG002
        """Returns the token ids."""
        return self.token_ids

    def as_json(self) -> msgspec.Raw:
        """Returns the JSON array: the client's own text if possible, because encoding takes as long as parsing."""
        # A line break would end an event of a stream.
        text = bytes(self._text)
        fit = text and b"\n" not in text and b"\r" not in text
        return msgspec.Raw(text) if fit else encode_token_ids(self.token_ids)


def encode_token_ids(tokens: TokenBuffer) -> msgspec.Raw:
    """Returns token ids as a JSON array."""
    return msgspec.Raw(tokens_to_json(tokens))
