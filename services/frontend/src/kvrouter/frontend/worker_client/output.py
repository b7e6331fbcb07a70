"""A piece of a worker's output, as it is read: nearly all pieces of a stream have only tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvrouter.v1.worker_pb2 import FinishReason, GenerateOutput, TopLogprobs


class TokensOnly:
    """A piece with nothing but tokens. It is read like a GenerateOutput, at a fraction of the cost of one.

    Whoever makes one sets ``token_ids``: an ``__init__`` would double what it costs.
    """

    __slots__ = ("token_ids",)

    finish_reason: Final = FinishReason.FINISH_REASON_UNSPECIFIED
    cached_tokens: Final = 0
    logprobs: Final[Sequence[float]] = ()
    top_logprobs: Final[Sequence[TopLogprobs]] = ()

    token_ids: Sequence[int]
    """Token ids; at least one."""

    def HasField(self, name: str) -> bool:  # noqa: ARG002, N802 - as of a message
        """Returns False: no optional field is set."""
        return False


Output = GenerateOutput | TokensOnly
"""A piece of the output, to be read and not changed."""
