"""Ends an answer at the number of tokens that the request asked for, whether or not its worker does."""

from __future__ import annotations

from dataclasses import dataclass

from kvrouter.v1.worker_pb2 import FinishReason, GenerateOutput, WorkerServiceGenerateResponse


@dataclass(frozen=True, slots=True)
class WorkerPiece:
    """A piece of a worker's answer."""

    encoded: bytes
    """A WorkerServiceGenerateResponse."""
    output: GenerateOutput

    @classmethod
    def parse(cls, encoded: bytes) -> WorkerPiece:
        """Reads a piece.

        Raises:
            DecodeError: it is not a WorkerServiceGenerateResponse.
        """
        return cls(encoded, WorkerServiceGenerateResponse.FromString(encoded).output)

    @classmethod
    def of(cls, output: GenerateOutput) -> WorkerPiece:
        """Encodes an output."""
        return cls(WorkerServiceGenerateResponse(output=output).SerializeToString(), output)


class OutputLimit:
    """Counts the tokens of one answer against ``max_tokens``."""

    def __init__(self, max_tokens: int) -> None:
        self._left = max_tokens
        self.overrun = False
        """Whether the worker went on beyond the limit."""

    @property
    def reached(self) -> bool:
        """Whether every token that may be generated has come."""
        return not self._left

    def cut(self, piece: WorkerPiece) -> WorkerPiece:
        """Returns the piece as it is, or, where it exceeds the limit, its part below the limit as the last piece."""
        tokens = len(piece.output.token_ids)
        if tokens <= self._left:
            self._left -= tokens
            return piece
        self.overrun = True
        output = GenerateOutput()
        output.CopyFrom(piece.output)
        del output.token_ids[self._left :]
        del output.token_engine_ns[self._left :]
        del output.logprobs[self._left :]
        if not output.token_ids:
            output.text = ""  # A text cannot be cut at a token without the tokenizer.
        output.finish_reason = FinishReason.FINISH_REASON_LENGTH
        self._left = 0
        return WorkerPiece.of(output)

    @staticmethod
    def last_piece() -> WorkerPiece:
        """Returns a piece without tokens that ends an answer at its limit."""
        return WorkerPiece.of(GenerateOutput(finish_reason=FinishReason.FINISH_REASON_LENGTH))
