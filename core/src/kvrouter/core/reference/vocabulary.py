"""Finds token ids unknown to a model."""

from __future__ import annotations

import struct

from kvrouter.core.interface import TokenBuffer
from kvrouter.core.reference.hashing import le32


def first_token_outside(tokens: TokenBuffer, vocabulary: int) -> int | None:
    """Returns the position of the first token id that is not below the size of the vocabulary; None if all are."""
    return next((at for at, (token,) in enumerate(struct.iter_unpack("<I", le32(tokens))) if token >= vocabulary), None)
