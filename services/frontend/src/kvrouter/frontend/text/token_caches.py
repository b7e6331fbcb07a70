"""Remembers the tokens of pieces of prompts and of words, so shared prefixes and new texts cost little.

A text is cut where its tokens are certain to be the same as without the cut. So the tokens of a text are those of its
pieces. Where it is cut depends only on the text before and just after the cut. So texts with a common prefix have
common pieces. A word ends at such a place, too.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

PIECE_CHARACTERS = 256
"""Shortest piece. Longer pieces cost less to look up, but more tokens of a prefix lie after its last cut."""
LONG_PIECE_CHARACTERS = 4 << 10
"""Shortest long piece. It is looked up first, and the pieces in it only if it is not known."""
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
        # One look-ahead: the search then leaves a character that begins no token after one comparison.
        tokens = "|".join(map(re.escape, before))
        places = [f"(?={tokens})"] if tokens else []
        self.gap: re.Pattern[str] | None = None
        """Matches the space after each such cut; None if ``after`` is empty."""
        if after:
            between = rf"(?<=[{re.escape(after)}])(?= [!-~])"
            places.insert(0, between)
            # The same places, but the search jumps from space to space.
            self.gap = re.compile(rf" (?=[!-~])(?<=[{re.escape(after)}] )")
        self._place = re.compile("|".join(places)) if places else None

    def next_cut(
        self, text: str, start: int, end: int, shortest: int = PIECE_CHARACTERS, budget: WordBudget | None = None
    ) -> int | None:
        """Returns the first cut at least ``shortest`` characters after ``start`` and before ``end``, or None.

        Raises:
            TooManyNewWords: the search takes more characters than the budget has.
        """
        first = start + shortest
        if self._place is None or first >= end:
            return None
        if budget is not None:
            end = min(end, first + budget.searched)
        # Python holds the GIL while it searches, so the part to search is bounded.
        found = self._place.search(text, first, end)
        cut = None if found is None else found.start()
        if budget is not None:
            budget.search((end if cut is None else cut) - first)
        return cut

    def pieces(self, text: str, budget: WordBudget | None = None) -> list[str]:
        """Returns the pieces of a text, in order. All but the last end at a cut.

        Raises:
            TooManyNewWords: the search takes more characters than the budget has.
        """
        pieces: list[str] = []
        start = 0
        while (cut := self.next_cut(text, start, len(text), budget=budget)) is not None:
            pieces.append(text[start:cut])
            start = cut
        pieces.append(text[start:])
        return pieces


class PieceCache:
    """Tokens of pieces, the least recently used ones dropped. Usable from several threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.size = 0
        """Memory of all entries, bytes."""
        self._tokens: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

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
            self.size += _size(piece, tokens)
            while self.size > self._max_bytes:
                self.size -= _size(*self._tokens.popitem(last=False))


def _size(piece: str, tokens: bytes) -> int:
    return _OVERHEAD_BYTES + len(piece.encode()) + len(tokens)


MAX_CHARACTERS = 64
"""Longest word to keep. Longer ones are hardly ever repeated."""
_ENTRY_BYTES = 384
"""Memory of an entry: at most 200 bytes, twice because the tables of Python grow so."""
_LEARNED = 4
"""Words kept of a text of which most are new. A word costs as much as two of the text: a call each."""


class TooManyNewWords(Exception):
    """More of a text is new than may be tokenized."""


@dataclass(slots=True)
class WordBudget:
    """Bounds the search for cuts, the text whose words are looked up, and the tokenized new words."""

    searched: int
    characters: int
    new_words: int

    def search(self, characters: int) -> None:
        """Takes characters that were searched for a cut out of the budget.

        Raises:
            TooManyNewWords: none are left.
        """
        self.searched -= characters
        if self.searched <= 0:
            raise TooManyNewWords

    def look_up(self, text: str) -> None:
        """Takes a text whose words are looked up out of the budget.

        Raises:
            TooManyNewWords: fewer characters are left.
        """
        self.characters -= len(text)
        if self.characters < 0:
            raise TooManyNewWords

    def tokenize(self, words: Sequence[str]) -> None:
        """Takes new words out of the budget.

        Raises:
            TooManyNewWords: fewer are left, or a word is so long it takes much more time than others.
        """
        self.new_words -= len(words)
        if self.new_words < 0 or any(len(word) > MAX_CHARACTERS for word in words):
            raise TooManyNewWords


class WordCache:
    """Tokens of words. Usable from several threads.

    There are two generations. When the younger one is full it becomes the older one, and the words of the one before
    it are dropped, unless they were used since.
    """

    def __init__(
        self, gap: re.Pattern[str], encode: Callable[[Sequence[str]], Sequence[bytes]], max_bytes: int
    ) -> None:
        """Starts empty.

        Args:
            gap: Matches the space before each word.
            encode: Returns the tokens of texts as packed buffers.
            max_bytes: Memory of the cache.
        """
        self._gap = gap
        self._encode = encode
        self._max_words = max(1, max_bytes // _ENTRY_BYTES // 2)
        # By word without the space before it.
        self._young: dict[str, bytes] = {}
        self._old: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def encode(self, text: str, budget: WordBudget | None = None) -> bytes:
        """Returns the tokens of a text as a packed buffer.

        Args:
            text: The text.
            budget: Text that may be looked up and new words that may be tokenized; None for any number.

        Raises:
            TooManyNewWords: the text is longer than the budget, or more of its words are new.
        """
        if budget is not None:
            budget.look_up(text)
        spaced = text[:1] == " "
        names = self._gap.split(text[1:] if spaced else text)
        # Only the first word of a whole text has no space before it.
        first = "" if spaced else names.pop(0)
        if budget is not None and first:
            budget.tokenize([first])
        found = list(map(self._young.get, names))
        if None in found:
            known, mostly_new = self._learn(
                dict.fromkeys(name for name, tokens in zip(names, found, strict=True) if tokens is None),
                len(names) // 2,
                budget,
            )
            if mostly_new:
                return self._encode([text])[0]
            found = [known[name] if tokens is None else tokens for name, tokens in zip(names, found, strict=True)]
        return (self._encode([first])[0] if first else b"") + b"".join(cast("list[bytes]", found))

    def _learn(self, names: Collection[str], max_new: int, budget: WordBudget | None) -> tuple[dict[str, bytes], bool]:
        """Adds words to the younger generation: few of them if there are too many new ones.

        Returns:
            The tokens of the added text, and whether there were too many.
        """
        old = self._old
        known = {name: old[name] for name in names if name in old}
        new = [name for name in names if name not in known]
        if budget is not None:
            budget.tokenize(new)
        too_many = len(new) > max_new
        if too_many:
            del new[_LEARNED:]
        if new:
            known.update(zip(new, self._encode([f" {name}" for name in new]), strict=True))
        for name, tokens in known.items():
            if len(name) <= MAX_CHARACTERS:
                if len(self._young) >= self._max_words:
                    self._old, self._young = self._young, {}
                self._young[name] = tokens
        return known, too_many
