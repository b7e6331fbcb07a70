"""Inputs and outputs of an engine: requests, steps, cache events, outputs, load, refusals."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple


class Scope(NamedTuple):
    """What must be equal besides the tokens for cached blocks to match. Empty strings mean none."""

    lora_name: str = ""
    cache_salt: str = ""
    tenant: str = ""


UNSCOPED = Scope()


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Returns token ids as little-endian u32, 4 bytes each. Raises OverflowError for an id outside of u32."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request. Raises ValueError if no engine of any size could serve it."""

    request_id: str
    """Unique among the engine's current requests."""
    prompt: bytes
    """Token ids as little-endian u32 (`pack_tokens`), at least one."""
    max_tokens: int
    """Output tokens after which the request ends, at least 1."""
    scope: Scope = UNSCOPED
    """Scope of its blocks; equal tokens in another scope never match."""
    stop_token_ids: frozenset[int] = frozenset()
    """Output tokens that end the request with `stop`. They are part of the output."""
    seed: int | None = None
    """Seed of the output tokens; None to use the request id, so that a replay repeats them."""
    received: bool = False
    """Whether the blocks of the prompt arrive from a prefill worker, so that only its last token is computed."""
    min_tokens: int = 0
    """Output tokens before which neither a stop token nor the drawn end ends the request."""
    ignore_eos: bool = False
    """Whether the output has no drawn end."""
    output: tuple[int, ...] = ()
    """The whole output, u32 each, which ends with `stop`; empty to draw it."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("the prompt is empty")
        if len(self.prompt) % 4:
            raise ValueError(f"the prompt has {len(self.prompt)} bytes: expected a multiple of 4")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}: expected at least 1")

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.prompt) // 4


class RequestRefused(Exception):
    """The engine refuses the request and stores nothing of it."""


class PromptTooLong(RequestRefused):
    """The prompt leaves no room for an output token within the maximum length of a sequence."""

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        super().__init__(f"the prompt has {prompt_tokens} tokens; this engine's limit for prompt and output is {limit}")


class DuplicateRequest(RequestRefused):
    """The engine already has a request with this id."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request {request_id} is already running or waiting")


class QueueFull(RequestRefused):
    """The queue is full."""

    def __init__(self, waiting: int) -> None:
        super().__init__(f"the queue is full: {waiting} requests wait")


class CacheTier(IntEnum):
    """Where a block is cached; the values are those of the enum Tier of the contract."""

    DEVICE = 1
    HOST = 2
    SHARED = 4


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks became cached: one physical copy each, a chain in the order of the prompt."""

    parent_hash: int | None
    """Engine hash of the parent of the first block; None at the start of a prompt."""
    engine_hashes: array[int]
    """Opaque ids, u64: type code Q."""
    tokens: bytes
    """Tokens of all blocks, block_size little-endian u32 each."""
    scope: Scope
    tier: CacheTier = CacheTier.DEVICE


@dataclass(frozen=True, slots=True)
class Removed:
    """One physical copy of each block was evicted, in this order. A hash may occur twice."""

    engine_hashes: array[int]
    tier: CacheTier = CacheTier.DEVICE


@dataclass(frozen=True, slots=True)
class Cleared:
    """The cache was emptied, in every tier."""


CacheEvent = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Step:
    """A scheduled engine step. Its events are valid from its start, its outputs come at its end."""

    started_at: float
    """Seconds of the driver's clock."""
    duration: float
    """Seconds that the driver lets pass before `end_step`."""
    events: tuple[CacheEvent, ...]
    """Cache events in the order in which they happened."""
    prefill_tokens: int
    """Prompt tokens computed in the step; after a preemption, this includes earlier output."""
    reused_tokens: int
    """Tokens that the admitted requests found in the cache, in any tier. For requests that return after a preemption
    this includes what they find of their own blocks, which `Output.cached_tokens` never does."""
    decode_sequences: int
    """Sequences that decode one token each."""
    preempted: int
    """Requests that returned to the queue because there were no free KV blocks."""

    @property
    def ends_at(self) -> float:
        """Seconds of the driver's clock."""
        return self.started_at + self.duration


class FinishReason(StrEnum):
    """Why a request ended."""

    LENGTH = "length"
    STOP = "stop"
    ABORT = "abort"


class Output(NamedTuple):
    """Output of one request in a step."""

    request_id: str
    token_ids: tuple[int, ...]
    """One token; none if aborted."""
    finish_reason: FinishReason | None
    """None while the request continues."""
    first_token: bool
    """Whether the token is the request's first."""
    cached_tokens: int
    """Prompt tokens found in the cache, in any tier, when the request was first scheduled; 0 before that."""
    submitted_at: float
    """Time of submission, seconds of the driver's clock."""
    scheduled_at: float
    """Time when it first ran, seconds of the driver's clock; equal to `submitted_at` if it never did."""
    host_tokens: int = 0
    """Those of `cached_tokens` that were loaded from host memory."""
    shared_tokens: int = 0
    """Those of `cached_tokens` that were loaded from shared storage."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load of the engine."""

    running: int
    """Running requests, which have KV blocks."""
    waiting: int
    """Requests in the queue."""
    active_blocks: int
    """KV blocks that running requests use; shared ones count once."""
    cached_blocks: int
    """KV blocks with reusable content that no request uses; they can be evicted."""
    total_blocks: int
    """KV blocks of the engine."""
    prefill_tokens: int
    """Tokens to compute before the next output of the queued requests and of the running prefill. What the cache will
    spare a waiting prompt is included, because it is known only when the prompt is scheduled."""


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A row of the block table."""

    parent_hash: int | None
    tokens: bytes
    scope: Scope
    copies: int
    """Physical copies, at least 1."""
