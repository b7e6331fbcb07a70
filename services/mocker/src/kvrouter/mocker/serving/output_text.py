"""Text of a generated sequence, and its end at a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from kvrouter.mocker.serving.tokenizer import Decoder


class OutputText:
    """Decodes a sequence as it is generated, and finds stop strings.

    The end of the text that may be the begin of a stop string is kept back until it is known to be none.
    """

    def __init__(self, stop: Sequence[str] = (), *, include_stop: bool = False) -> None:
        self.stopped_by: str | None = None
        """The stop string that was found."""
        self._stop = stop
        self._include_stop = include_stop
        self._keep_back = 0 if include_stop else max(map(len, stop), default=1) - 1
        self._decoder = Decoder()
        self._text = ""
        self._emitted = 0

    def push(self, token_id: int) -> bool:
        """Adds a token; returns whether the text is complete, because it contains a stop string."""
        before = len(self._text)
        self._text += self._decoder.push(token_id)
        found = [
            (at, each) for each in self._stop if (at := self._text.find(each, max(0, before - len(each) + 1))) >= 0
        ]
        if not found:
            return False
        at, self.stopped_by = min(found)
        self._text = self._text[: at + len(self.stopped_by) if self._include_stop else at]
        return True

    def take(self, *, ended: bool) -> str:
        """Returns the text since the last call; with ``ended``, all of the rest."""
        if ended:
            if self.stopped_by is None:
                self._text += self._decoder.finish()
            until = len(self._text)
        else:
            until = max(self._emitted, len(self._text) - self._keep_back)
        piece, self._emitted = self._text[self._emitted : until], until
        return piece
