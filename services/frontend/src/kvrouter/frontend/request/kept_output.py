"""Keeps the output tokens of a request, from which another worker can continue it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Final

_MAX_PIECES = 512
"""Pieces that are kept before ``compact`` packs their tokens."""


class KeptOutput:
    """The output tokens of a request. Keeping a piece costs one append; many are packed at once."""

    def __init__(self) -> None:
        self._tokens = array("I")
        self._pieces: list[Sequence[int]] = []
        self.add: Final = self._pieces.append
        """Adds the token ids of a piece."""

    def compact(self) -> None:
        """Limits the memory of the pieces. To be called now and then."""
        if len(self._pieces) > _MAX_PIECES:
            self._pack()

    def packed(self) -> bytes:
        """Returns the tokens as a packed buffer."""
        self._pack()
        return self._tokens.tobytes()

    def _pack(self) -> None:
        self._tokens.extend(chain.from_iterable(self._pieces))
        self._pieces.clear()
