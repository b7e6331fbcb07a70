"""One piece of a request's output, whoever sends it: a worker over gRPC, or an engine over its OpenAI API.

Nearly all pieces of a stream have only tokens: an ``Output``. The others are a ``DetailedOutput``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import msgspec
from kvrouter.v1.common_pb2 import LowerTiers
from kvrouter.v1.worker_pb2 import (
    FinishReason,
    GenerateOutput,
    TopLogprobs,
    TransferParams,
    WorkerServiceGenerateResponse,
)

OptionalField = Literal["cached_tokens", "finish_reason", "transfer_params"]

_UNFINISHED = FinishReason.FINISH_REASON_UNSPECIFIED


class Output(msgspec.Struct, eq=False, gc=False):
    """Tokens and nothing else."""

    tokens: int = 0
    """Number of tokens."""
    token_ids: Sequence[int] = ()
    """Their ids; fewer if an engine does not tell them all."""
    raw: bytes = b""
    """The piece as it was received: an encoded WorkerServiceGenerateResponse, or bytes for the client of an engine."""

    # Not annotated, so that they are no fields: what a piece with more may have.
    finish_reason = _UNFINISHED
    cached_tokens = cast("int | None", None)
    lower_cached_tokens = cast("LowerTiers | None", None)
    transfer_params = cast("TransferParams | None", None)
    logprobs = cast("Sequence[float]", ())
    top_logprobs = cast("Sequence[TopLogprobs]", ())
    is_of_worker = False

    def without(self, field: OptionalField) -> Output:  # noqa: ARG002 - it has none
        """Returns the piece without one of its optional fields."""
        return self

    def first(self, tokens: int) -> DetailedOutput:
        """Returns the first tokens of a worker's piece, ended with finish reason LENGTH."""
        rest = self.copy_message()
        del rest.token_ids[tokens:]
        del rest.token_engine_ns[tokens:]
        del rest.logprobs[tokens:]
        del rest.top_logprobs[tokens:]
        if not rest.token_ids:
            rest.text = ""  # Cutting the text at a token would need the tokenizer.
        rest.finish_reason = FinishReason.FINISH_REASON_LENGTH
        return DetailedOutput.of(rest)

    def copy_message(self) -> GenerateOutput:
        """Returns a copy of the worker's message, to be changed."""
        return WorkerServiceGenerateResponse.FromString(self.raw).output if self.is_of_worker else GenerateOutput()


class DetailedOutput(Output, kw_only=True, eq=False, gc=False):
    """Tokens with more, such as the reason why the output ends."""

    finish_reason: FinishReason = _UNFINISHED
    cached_tokens: int | None = None
    """Prompt tokens in the worker's cache, in any tier; None if unknown."""
    lower_cached_tokens: LowerTiers | None = None
    """Those of them below device memory; None if there are none, or if unknown."""
    transfer_params: TransferParams | None = None
    """Hands the prompt's KV blocks over, in the output of a prefill."""
    logprobs: Sequence[float] = ()
    top_logprobs: Sequence[TopLogprobs] = ()
    is_of_worker: bool = False
    """Whether it comes from a worker, not from an engine's OpenAI API."""

    @classmethod
    def read(cls, encoded: bytes, plain: tuple[tuple[int, ...], int, int | None] | None) -> DetailedOutput:
        """Returns the piece in an encoded WorkerServiceGenerateResponse; ``plain`` is what ``read_output`` says of it.

        Raises:
            DecodeError: it cannot be decoded.
        """
        if plain is None:
            return cls.of(WorkerServiceGenerateResponse.FromString(encoded).output, encoded)
        token_ids, finish_reason, cached_tokens = plain
        return cls(
            len(token_ids),
            token_ids,
            encoded,
            finish_reason=cast(FinishReason, finish_reason),
            cached_tokens=cached_tokens,
            is_of_worker=True,
        )

    @classmethod
    def of(cls, message: GenerateOutput, raw: bytes = b"") -> DetailedOutput:
        """Returns the piece of a worker's message; ``raw`` is its encoding, empty to make it."""
        token_ids = tuple(message.token_ids)
        return cls(
            len(token_ids),
            token_ids,
            raw or WorkerServiceGenerateResponse(output=message).SerializeToString(),
            finish_reason=message.finish_reason,
            cached_tokens=message.cached_tokens if message.HasField("cached_tokens") else None,
            lower_cached_tokens=message.lower_cached_tokens if message.HasField("lower_cached_tokens") else None,
            transfer_params=message.transfer_params if message.HasField("transfer_params") else None,
            logprobs=message.logprobs,
            top_logprobs=message.top_logprobs,
            is_of_worker=True,
        )

    @classmethod
    def last(cls) -> DetailedOutput:
        """Returns a piece without tokens ending the output with finish reason LENGTH."""
        return cls.of(GenerateOutput(finish_reason=FinishReason.FINISH_REASON_LENGTH))

    def without(self, field: OptionalField) -> DetailedOutput:
        """Returns the piece without one of its optional fields."""
        if not self.is_of_worker:
            return DetailedOutput(self.tokens, self.token_ids, self.raw, finish_reason=self.finish_reason)
        rest = self.copy_message()
        rest.ClearField(field)
        if field == "cached_tokens":
            rest.ClearField("lower_cached_tokens")
        return DetailedOutput.of(rest)
