"""Enforces ``max_tokens`` on a worker's output, whether or not the worker does."""

from __future__ import annotations

from typing import NamedTuple

from kvrouter.v1.worker_pb2 import FinishReason, GenerateOutput, WorkerServiceGenerateResponse


class WorkerPiece(NamedTuple):
    """A piece of a worker's output."""

    encoded: bytes
    """A WorkerServiceGenerateResponse."""
    output: GenerateOutput

    @classmethod
    def of(cls, output: GenerateOutput) -> WorkerPiece:
        """Encodes an output."""
        return cls(WorkerServiceGenerateResponse(output=output).SerializeToString(), output)


class OutputLimit:
    """Counts the output tokens of one request against ``max_tokens``."""

    def __init__(self, max_tokens: int) -> None:
        self._left = max_tokens
        self.overrun = False
        """Whether the worker generated more than ``max_tokens``."""

    @property
    def reached(self) -> bool:
        """Whether ``max_tokens`` tokens have arrived."""
        return not self._left

    def admits(self, tokens: int) -> bool:
        """Counts tokens, unless they exceed the limit. Returns whether they are within it."""
        if tokens > self._left:
            return False
        self._left -= tokens
        return True

    def cut(self, piece: WorkerPiece) -> WorkerPiece:
        """Returns the piece unchanged, or if it exceeds the limit, its first part with finish reason LENGTH."""
        if self.admits(len(piece.output.token_ids)):
            return piece
        self.overrun = True
        output = GenerateOutput()
        output.CopyFrom(piece.output)
        del output.token_ids[self._left :]
        del output.token_engine_ns[self._left :]
        del output.logprobs[self._left :]
        del output.top_logprobs[self._left :]
        if not output.token_ids:
            output.text = ""  # Cutting the text at a token would need the tokenizer.
        output.finish_reason = FinishReason.FINISH_REASON_LENGTH
        self._left = 0
        return WorkerPiece.of(output)

    @staticmethod
    def last_piece() -> WorkerPiece:
        """Returns a piece without tokens that ends the output with finish reason LENGTH."""
        return WorkerPiece.of(GenerateOutput(finish_reason=FinishReason.FINISH_REASON_LENGTH))
