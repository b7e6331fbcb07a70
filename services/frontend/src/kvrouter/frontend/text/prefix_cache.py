"""Remembers the tokens of pieces of prompts, so a shared prefix is tokenized once.

A text is cut where its tokens are certain to be the same as without the cut. So the tokens of a text are those of its
pieces. Where it is cut depends only on the text before and just after the cut. So texts with a common prefix have
common pieces.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable

PIECE_CHARACTERS = 256
"""Shortest piece. Longer pieces cost less to look up, but more tokens of a prefix lie after its last cut."""
_OVERHEAD_BYTES = 256
"""Memory of an entry besides its text and tokens."""


class Cutter:
    """Cuts texts into pieces."""

    def __init__(self, *, after: str, before: Iterable[str]) -> None:
        """Compiles the rule.

        Args:
            after: Characters after which to cut, where a space and a printable ASCII character follow; may be empty.
            before: Special tokens before which to cut.
        """
        places = [rf"(?={re.escape(token)})" for token in before]
        self.gap: re.Pattern[str] | None = None
        """Matches the space after each such cut; None if ``after`` is empty."""
        if after:
            between = rf"(?<=[{re.escape(after)}])(?= [!-~])"
            places.insert(0, between)
            # The same places, but the search jumps from space to space.
            self.gap = re.compile(rf" (?=[!-~])(?<=[{re.escape(after)}] )")
        self._place = re.compile("|".join(places)) if places else None

    def next_cut(self, text: str, start: int, end: int) -> int | None:
        """Returns the first cut at least a piece after ``start`` and before ``end``; None if there is none."""
        if self._place is None or start + PIECE_CHARACTERS >= end:
            return None
        # Python holds the GIL while it searches, so the part to search is bounded.
        found = self._place.search(text, start + PIECE_CHARACTERS, end)
        return None if found is None else found.start()

    def pieces(self, text: str) -> list[str]:
        """Returns the pieces of a text, in order. All but the last end at a cut."""
        pieces: list[str] = []
        start = 0
        while (cut := self.next_cut(text, start, len(text))) is not None:
            pieces.append(text[start:cut])
            start = cut
        pieces.append(text[start:])
        return pieces


class PieceCache:
    """Tokens of pieces, the least recently used ones dropped. Usable from several threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._tokens: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Memory of all entries, bytes."""
        return self._bytes

    def get(self, piece: str) -> bytes | None:
        """Returns the tokens of a piece as a packed buffer; None if they are not known."""
        with self._lock:
            tokens = self._tokens.get(piece)
            if tokens is not None:
                self._tokens.move_to_end(piece)
            return tokens

    def put(self, piece: str, tokens: bytes) -> None:
        """Adds the tokens of a piece."""
        with self._lock:
            if piece in self._tokens:
                return
            self._tokens[piece] = tokens
            self._bytes += _size(piece, tokens)
            while self._bytes > self._max_bytes:
                self._bytes -= _size(*self._tokens.popitem(last=False))


def _size(piece: str, tokens: bytes) -> int:
    return _OVERHEAD_BYTES + len(piece.encode()) + len(tokens)
