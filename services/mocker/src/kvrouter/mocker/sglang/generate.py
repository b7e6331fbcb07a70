"""Bodies and responses of ``/generate``."""

from __future__ import annotations

from typing import Any

import msgspec
from kvrouter.mocker.openai.sampling import constraint_of
from kvrouter.mocker.serving.errors import ApiError
from kvrouter.mocker.serving.generations import Piece, Sampling
from kvrouter.mocker.serving.tokenizer import encode


class SamplingBody(msgspec.Struct):
    """Sampling parameters. Those without effect on the simulation are ignored."""

    max_new_tokens: int | None = 128
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    no_stop_trim: bool = False
    min_new_tokens: int = 0
    ignore_eos: bool = False
    temperature: float | None = None
    sampling_seed: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    n: int = 1

    def sampling(self, prompt_tokens: int, limit: int) -> Sampling:
        """Returns what is asked of the output of a prompt.

        Args:
            prompt_tokens: Length of the prompt.
            limit: Maximum length of prompt and output, in tokens.

        Raises:
            ApiError: prompt and output exceed the limit, or a number is out of range.
        """
        if prompt_tokens >= limit:
            raise ApiError(
                400,
                f"The input ({prompt_tokens} tokens) is longer than the model's context length ({limit} tokens).",
                param="input_ids",
            )
        requested = limit - prompt_tokens if self.max_new_tokens is None else self.max_new_tokens
        if requested < 1:
            raise ApiError(400, f"max_new_tokens must be at least 1, got {requested}.", param="max_new_tokens")
        if prompt_tokens + requested > limit:
            raise ApiError(
                400,
                f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a "
                f"total of {prompt_tokens + requested} tokens: {prompt_tokens} tokens from the input messages and "
                f"{requested} tokens for the completion. Please reduce the number of tokens in the input messages or "
                "the completion to fit within the limit.",
                param="max_new_tokens",
            )
        if self.n != 1:
            raise ApiError(501, "The simulated engine generates one choice for each prompt.", param="n")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Sampling(
            max_tokens=requested,
            stop=[each for each in stop if each],
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            include_stop=self.no_stop_trim,
            seed=self.sampling_seed,
            min_tokens=self.min_new_tokens,
            ignore_eos=self.ignore_eos,
            greedy=self.temperature == 0,
            constraint=constraint_of({"json": self.json_schema, "regex": self.regex}),
        )


class GenerateBody(msgspec.Struct, kw_only=True):
    """The body of ``/generate``, with one prompt."""

    rid: str | None = None
    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: SamplingBody | None = None
    stream: bool = False
    return_logprob: bool | None = None
    lora_path: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    session_id: str | None = None
    priority: int | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    disagg_prefill_dp_rank: int | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None

    def prompt(self) -> list[int]:
        """Returns the token ids of the prompt."""
        if (self.text is None) == (self.input_ids is None):
            raise ApiError(400, "Either text, input_ids or input_embeds should be provided.")
        prompt = encode(self.text) if self.text is not None else self.input_ids
        if not prompt:
            raise ApiError(400, "The prompt is empty.")
        return prompt


class GenerateResponse:
    """The response to one prompt so far."""

    def __init__(self, rid: str, prompt_tokens: int, dp_rank: int, *, incremental: bool, logprobs: bool) -> None:
        """Args:
        rid: Id of the request.
        prompt_tokens: Length of the prompt.
        dp_rank: Rank that serves it.
        incremental: Whether a chunk has the output since the previous one instead of all of it.
        logprobs: Whether log probabilities are returned.
        """  # noqa: D205
        self._rid = rid
        self._prompt_tokens = prompt_tokens
        self._dp_rank = dp_rank
        self._incremental = incremental
        self._logprobs = logprobs
        self._cached_tokens = 0
        self._token_ids: list[int] = []
        self._text = ""

    def add(self, piece: Piece) -> dict[str, Any]:
        """Adds a piece and returns the response so far, or the chunk for the piece."""
        self._token_ids += piece.token_ids
        self._text += piece.text
        if piece.cached_tokens is not None:
            self._cached_tokens = piece.cached_tokens
        meta_info: dict[str, Any] = {
            "id": self._rid,
            "finish_reason": self._finish_reason(piece),
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": len(self._token_ids),
            "cached_tokens": self._cached_tokens,
            "dp_rank": self._dp_rank,
            "weight_version": "default",
        }
        token_ids = piece.token_ids if self._incremental else list(self._token_ids)
        if self._logprobs:
            meta_info["output_token_logprobs"] = [(-0.5, token_id, None) for token_id in token_ids]
        text = piece.text if self._incremental else self._text
        return {"text": text, "output_ids": token_ids, "meta_info": meta_info}

    def _finish_reason(self, piece: Piece) -> dict[str, Any] | None:
        match piece.finish_reason:
            case None:
                return None
            case "length":
                return {"type": "length", "length": len(self._token_ids)}
            case "stop":
                return {"type": "stop", "matched": piece.stop_reason}
            case _:
                return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
