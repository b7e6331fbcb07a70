"""Keeps the output tokens of a request, from which another worker can continue it."""

from __future__ import annotations

from array import array
from typing import Final

from kvrouter.v1.worker_pb2 import WorkerServiceGenerateResponse

_MAX_PIECES = 512
"""Encoded pieces that are kept before ``compact`` extracts their tokens."""

_parse = WorkerServiceGenerateResponse.FromString


class KeptOutput:
    """The output tokens of a request.

    Keeping a piece costs one append. The tokens are extracted from many pieces at once: encoded pieces in a row are the
    encoding of one piece with all their tokens.
    """

    def __init__(self) -> None:
        self._tokens = array("I")
        self._pieces: list[bytes] = []
        self.add: Final = self._pieces.append
        """Adds a piece, an encoded WorkerServiceGenerateResponse."""

    def compact(self) -> None:
        """Limits the memory of the pieces. To be called now and then."""
        if len(self._pieces) > _MAX_PIECES:
            self._extract()

    def packed(self) -> bytes:
        """Returns the tokens as a packed buffer."""
        self._extract()
        return self._tokens.tobytes()

    def _extract(self) -> None:
        self._tokens.extend(_parse(b"".join(self._pieces)).output.token_ids)
        self._pieces.clear()
