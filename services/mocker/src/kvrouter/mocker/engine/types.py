"""What goes into an engine and what comes out: requests, steps, cache events, outputs, load, refusals."""

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Scope(NamedTuple):
    """What must be equal, besides the tokens, for cached blocks to match. Empty strings mean none."""

    lora_name: str = ""
    cache_salt: str = ""
    tenant: str = ""


UNSCOPED = Scope()


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as little-endian u32, 4 bytes each. Raises OverflowError for an id that is no u32."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request. Raises ValueError for what no engine could serve, whatever its size."""

    request_id: str
    """Unique among the requests that the engine holds."""
    prompt: bytes
    """Token ids as little-endian u32 (`pack_tokens`); at least one."""
    max_tokens: int
    """Output tokens after which the request ends, at least 1."""
    scope: Scope = UNSCOPED
    """Equal tokens under another scope never match."""
    stop_token_ids: frozenset[int] = frozenset()
    """An output token among these ends the request with `stop`, and is part of the output."""
    seed: int | None = None
    """Seeds the output tokens; None: the request id does, so that a replay repeats them."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("the prompt is empty")
        if len(self.prompt) % 4:
            raise ValueError(f"the prompt has {len(self.prompt)} bytes, not a multiple of 4")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}, must be at least 1")

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.prompt) // 4


class RequestRefused(Exception):
    """The engine will not take the request. Nothing of it is kept."""


class PromptTooLong(RequestRefused):
    """The prompt leaves no room for one output token within the longest sequence that the engine can hold."""

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        super().__init__(f"the prompt has {prompt_tokens} tokens; prompt and output may have {limit} in this engine")


class DuplicateRequest(RequestRefused):
    """The engine holds a request of that id already."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request {request_id} is running or waiting already")


class QueueFull(RequestRefused):
    """As many requests wait as may."""

    def __init__(self, waiting: int) -> None:
        super().__init__(f"{waiting} requests wait, as many as may")


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks became cached: one physical copy each, a chain in the order of the prompt."""

    parent_hash: int | None
    """Engine hash of the block before the first of these; None: these start a prompt."""
    engine_hashes: tuple[int, ...]
    """u64 each, opaque."""
    token_blocks: tuple[bytes, ...]
    """The tokens of each block, little-endian u32, block_size of them."""
    scope: Scope


@dataclass(frozen=True, slots=True)
class Removed:
    """One physical copy of each of these was evicted, in this order. A hash may occur twice."""

    engine_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """The cache holds nothing any more."""


CacheEvent = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step, scheduled. Its events are true from its start, its outputs come at its end."""

    started_at: float
    """Seconds on the driver's clock."""
    duration: float
    """Seconds that the driver lets pass before `end_step`."""
    events: tuple[CacheEvent, ...]
    """In the order in which they happened."""
    prefill_tokens: int
    """Prompt tokens computed in the step (after a preemption, earlier output too)."""
    reused_tokens: int
    """Tokens that the cache spared the requests admitted in the step. Of those that come back after a preemption this
    counts what they find of themselves, which no `Output.cached_tokens` does."""
    decode_sequences: int
    """Sequences that decode one token each."""
    preempted: int
    """Requests sent back to the queue for want of KV blocks."""

    @property
    def ends_at(self) -> float:
        """Seconds on the driver's clock."""
        return self.started_at + self.duration


class FinishReason(StrEnum):
    """Why a request ended."""

    LENGTH = "length"
    STOP = "stop"
    ABORT = "abort"


class Output(NamedTuple):
    """What a step gave one request."""

    request_id: str
    token_ids: tuple[int, ...]
    """One token; none when aborted."""
    finish_reason: FinishReason | None
    """None while the request goes on."""
    first_token: bool
    """Whether this is the request's first output token."""
    cached_tokens: int
    """Prompt tokens found in the cache when the request was first scheduled; 0 before that."""
    submitted_at: float
    """When the request was submitted, seconds on the driver's clock."""
    scheduled_at: float
    """When it first ran, seconds on the driver's clock; equal to `submitted_at` if it never did."""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is."""

    running: int
    """Requests that hold KV blocks."""
    waiting: int
    """Requests in the queue."""
    active_blocks: int
    """KV blocks in use by running requests, shared ones once."""
    cached_blocks: int
    """KV blocks that hold reusable content and are in use by nobody: free to be evicted."""
    total_blocks: int
    """KV blocks that there are."""
    prefill_tokens: int
    """Tokens yet to be computed before their requests' next output: of the queue and of the running prefill. What the
    cache will spare of a waiting prompt is not known before it is scheduled, and is included."""


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """One row of the block table."""

    parent_hash: int | None
    tokens: bytes
    scope: Scope
    copies: int
    """Physical copies, at least 1."""
