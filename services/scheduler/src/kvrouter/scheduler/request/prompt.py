"""The prompt of a routing request, checked and converted to block hashes."""

from __future__ import annotations

from array import array

import msgspec
from kvrouter.core import Scope, local_hashes, sequence_hashes
from kvrouter.runtime.requests import check_prompt_length, content_in_blocks, longest_prompt, pack_local_hashes
from kvrouter.v1.common_pb2 import RoutingRequest
from kvrouter.v1.errors import BadRequest, BlockSizeMismatch

HASH_BYTES = 8
MAX_SEQUENCES = 1024
"""Maximum number of sequences of one request."""
_EMPTY = "Send 1 token id or more, or local hashes with prompt_tokens."


class Prompt(msgspec.Struct, frozen=True):
    """A prompt as blocks."""

    tokens: int
    """Number of tokens, at least 1."""
    local_hashes: bytes
    """Packed little-endian u64, one for each full block."""
    sequence_hashes: bytes
    """Packed little-endian u64: the sequence hash of each full block."""
    is_estimated: bool = False
    """Whether the number of tokens is an estimate."""
    sequences: int = 1
    """Number of sequences that the engine generates from it, each of which takes a slot."""
    indexed_blocks: int | None = None
    """Leading blocks that an index can know; further ones have content whose id only the engine knows. None for all."""

    def __repr__(self) -> str:
        """Returns the size only: hashes are long."""
        return f"Prompt(tokens={self.tokens})"

    @property
    def blocks(self) -> int:
        """Number of full blocks."""
        return len(self.sequence_hashes) // HASH_BYTES

    def reusable_blocks(self, block_size: int) -> int:
        """Returns how many blocks are reusable from an engine's cache.

        Engines compute at least the last token of a prompt, so of n tokens they reuse (n - 1) div block_size blocks.
        """
        return (self.tokens - 1) // block_size

    def reusable_hashes(self, block_size: int) -> bytes:
        """Returns the local hashes of the blocks reusable from an engine's cache."""
        return self.local_hashes[: self.reusable_blocks(block_size) * HASH_BYTES]


def read_prompt(
    request: RoutingRequest,
    *,
    block_size: int,
    max_model_len: int = 0,
    max_prompt_tokens: int = 1 << 32,
    largest_cache: int = 0,
) -> Prompt:
    """Returns the prompt of a request.

    Args:
        request: A request with token ids, or with local hashes and the number of tokens.
        block_size: Tokens per block of the component.
        max_model_len: Most tokens in prompt and output together; 0 for no limit.
        max_prompt_tokens: Most tokens in the prompt, whatever the model allows.
        largest_cache: Most blocks in the KV cache of a rank; 0 if unknown. A prompt whose length is estimated is cut
            to these and the limits, since it may be shorter.

    Raises:
        BadRequest: there is no prompt, or the number of hashes, tokens or sequences does not fit.
        BlockSizeMismatch: the hashes were made with another block size.
        PromptTooLong: the prompt was counted and exceeds a limit, or leaves no room for an output token.
    """
    if "block_size" in request and request.block_size != block_size:
        raise BlockSizeMismatch(request.block_size, block_size)
    local = b""
    has_hashes = "local_hashes" in request
    if has_hashes:
        tokens, local = request.prompt_tokens, pack_local_hashes(request.local_hashes)
        hashes = len(local) // HASH_BYTES
        if not tokens or tokens // block_size != hashes:
            raise _miscounted(tokens, hashes, block_size)
    else:
        tokens = _count_ids(request)
    is_estimated = request.length_is_estimated
    if is_estimated:
        tokens = min(tokens, longest_prompt(max_model_len, max_prompt_tokens), largest_cache * block_size or tokens)
        tokens = max(1, tokens)
    else:
        check_prompt_length(tokens, max_model_len, max_prompt_tokens)
    if not has_hashes:
        scope = Scope(request.scope.lora_name, request.scope.cache_salt, request.scope.tenant)
        multimodal = content_in_blocks(request.multimodal_hashes, block_size)
        try:
            local = local_hashes(array("I", request.token_ids.ids), block_size, scope, multimodal)
        except ValueError as error:
            raise BadRequest(f"the prompt cannot be hashed: {error}", field="token_ids") from None
    local = local[: tokens // block_size * HASH_BYTES]
    indexed_blocks = request.indexed_blocks if "indexed_blocks" in request else None
    sequences = _sequences(request) if "sequences" in request else 1
    return Prompt(tokens, local, sequence_hashes(local), is_estimated, sequences, indexed_blocks)


def _sequences(request: RoutingRequest) -> int:
    sequences = request.sequences
    if not 1 <= sequences <= MAX_SEQUENCES:
        raise BadRequest(
            f"expected 1 to {MAX_SEQUENCES} sequences, received {sequences}",
            field="sequences",
            advice="Leave the field unset for one sequence.",
        )
    return sequences


def _miscounted(tokens: int, hashes: int, block_size: int) -> BadRequest:
    if tokens == 0:
        message = "prompt_tokens is 0" if hashes else "the prompt is empty"
        return BadRequest(message, field="prompt_tokens", advice=_EMPTY)
    return BadRequest(
        f"{tokens} tokens have {tokens // block_size} full blocks of {block_size}, {hashes} hashes were sent",
        field="local_hashes",
        advice="Send one hash for each full block.",
    )


def _count_ids(request: RoutingRequest) -> int:
    tokens = len(request.token_ids.ids)
    if tokens == 0:
        raise BadRequest("the prompt is empty", field="token_ids", advice=_EMPTY)
    if request.prompt_tokens not in (0, tokens):
        raise BadRequest(
            f"prompt_tokens is {request.prompt_tokens}, but {tokens} token ids were sent",
            field="prompt_tokens",
            advice="Leave it 0 with token ids.",
        )
    return tokens
