from __future__ import annotations

import sys

from kvrouter.mocker.engine.block_pool import Block, engine_hash, root_hash
from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.mocker.engine.types import EngineRequest, pack_tokens
from xxhash import xxh3_64_intdigest

_MULTIPLIER, _INCREMENT, _MASK = 6364136223846793005, 1442695040888963407, (1 << 64) - 1
"""Constants of Knuth's MMIX generator, a linear congruential generator mod 2^64; the high half of its state is used."""


def output_stream(request: EngineRequest) -> int:
    """Returns the initial state (u64) of the generator of a request's output tokens.

    A token depends on the seed, or else the request's id, and on its position in the sequence. So a request that
    continues elsewhere, with the output so far in its prompt, has the same further output.
    """
    return _skipped(xxh3_64_intdigest(_source(request).encode()), request.prompt_tokens)


def output_end(request: EngineRequest, config: EngineConfig) -> int | None:
    """Returns the output tokens after which a request ends by itself; None if only its maximum ends it.

    Every token from ``min_tokens`` on ends the output with the same probability. Lengths are distributed geometrically,
    and whether a token is the last depends on the same as the token, so a request that continues elsewhere has the
    same end.
    """
    if request.output:
        return len(request.output)
    if request.ignore_eos or not config.mean_output_tokens:
        return None
    first = max(1, request.min_tokens)
    state = _skipped(xxh3_64_intdigest(f"{_source(request)} end".encode()), request.prompt_tokens + first - 1)
    threshold = (1 << 32) / config.mean_output_tokens
    for length in range(first, request.max_tokens + 1):
        state = (state * _MULTIPLIER + _INCREMENT) & _MASK
        if state >> 32 < threshold:
            return length
    return None


def _source(request: EngineRequest) -> str:
    return request.request_id if request.seed is None else str(request.seed)


def _skipped(state: int, steps: int) -> int:
    """Returns the generator's state after that many steps. Takes the logarithm of their number."""
    multiplier, increment = _MULTIPLIER, _INCREMENT
    while steps:
        if steps & 1:
            state = (state * multiplier + increment) & _MASK
        increment = (multiplier + 1) * increment & _MASK
        multiplier = multiplier * multiplier & _MASK
        steps >>= 1
    return state


class Sequence:
    """A request in the engine: its known tokens, how many of them are computed, and its blocks.

    `length` counts known tokens: the prompt and all output. `computed` of them are in the KV cache; the next steps
    compute the rest. `held` counts its blocks, own or shared; the first `len(blocks)` of those are cached.
    """

    __slots__ = (
        "_planned",
        "_root",
        "_stream",
        "_width",
        "blocks",
        "cached_tokens",
        "chain",
        "computed",
        "ends_at",
        "held",
        "length",
        "limit",
        "loaded_tokens",
        "pieces",
        "prompt_tokens",
        "received",
        "request",
        "room",
        "scheduled",
        "scheduled_at",
        "stops_from",
        "submitted_at",
        "upcoming",
    )

    def __init__(self, request: EngineRequest, config: EngineConfig, submitted_at: float) -> None:
        self.request = request
        self.submitted_at = submitted_at
        self.received = request.received
        """Whether the blocks of its prompt have arrived and are not admitted yet."""
        self.scheduled = False
        self.scheduled_at = submitted_at
        self.cached_tokens = 0
        self.loaded_tokens = (0, 0)
        """Those of them that were loaded from host memory and from shared storage."""
        self.prompt_tokens = self.length = request.prompt_tokens
        self.limit = min(self.length + request.max_tokens, config.length_limit)
        end = output_end(request, config)
        self.ends_at = sys.maxsize if end is None else self.length + end
        """Length at which it ends with `stop`."""
        self.stops_from = self.length + request.min_tokens
        """Length before which no stop token ends it."""
        self.computed = 0
        self.held = 0
        self.room = 0
        """Tokens that fit into its blocks."""
        self.blocks: list[Block] = []
        self.chain: list[int] = []
        """chain[i] is the parent hash of block i, chain[i + 1] its own hash."""
        self.pieces: list[bytes] = []
        """Tokens of each block. Empty until `cut`, like `chain`."""
        self.upcoming: list[int] = []
        """Output tokens that are drawn but not yet known, the next one last."""
        self._width = 4 * config.block_size  # bytes of a block's tokens
        self._root = root_hash(config.hash_seed, request.scope)
        self._stream: int | None = None
        self._planned = 0  # output tokens

    def cut(self) -> None:
        """Cuts the prompt into blocks and hashes them, if that is not done yet.

        This waits until the sequence is first in the queue, so that a long queue stores packed prompts only.
        """
        if self.chain:
            return
        width = self._width
        prompt = self.request.prompt
        full = len(prompt) // width
        self.pieces = [prompt[i : i + width] for i in range(0, full * width, width)]
        chain = [self._root]
        parent = self._root
        for piece in self.pieces:
            parent = engine_hash(parent, piece)
            chain.append(parent)
        self.chain = chain

    def plan_output(self, vocabulary_size: int) -> list[int]:
        """Draws the output tokens up to the end of the block that contains the sequence's end; returns `upcoming`.

        The block is hashed with all of them. It is cached, and can be found, only once its tokens are known and
        computed: `length` and `computed` decide that, not `pieces`.
        """
        state = self._stream
        if state is None:
            state = output_stream(self.request)
            begun = self.request.prompt[len(self.pieces) * self._width :]
        else:
            begun = b""
        drawn = []
        for _ in range((self._width - len(begun)) // 4):
            state = (state * _MULTIPLIER + _INCREMENT) & _MASK
            drawn.append((state >> 32) * vocabulary_size >> 32)
        self._stream = state
        known = self.request.output[self._planned : self._planned + len(drawn)]
        drawn[: len(known)] = known
        self._planned += len(drawn)
        piece = begun + pack_tokens(drawn)
        self.pieces.append(piece)
        self.chain.append(engine_hash(self.chain[-1], piece))
        drawn.reverse()
        self.upcoming = drawn
        return drawn
