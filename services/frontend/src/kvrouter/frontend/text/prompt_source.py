"""What the prompts of requests have in common until they are tokenized."""

from __future__ import annotations

from typing import Protocol

from kvrouter.frontend.text.client_work import Slices
from kvrouter.frontend.text.model_text import ModelText


class PromptSource(Protocol):
    """One prompt, not tokenized yet."""

    field: str
    """The field of the body that has it."""
    characters: int
    """Its size."""

    def slices(self, text: ModelText | None, limit: int) -> Slices[bytes]:
        """Renders and tokenizes it in slices, and returns its tokens as a packed buffer. Runs in a thread.

        Raises:
            BadRequest, PromptTooLong.
        """
        ...

    def tokens_at_once(self, text: ModelText, limit: int) -> bytes | None:
        """Returns the same if that takes a fraction of a millisecond; otherwise None. Runs on the event loop.

        Raises:
            BadRequest, PromptTooLong.
        """
        ...
