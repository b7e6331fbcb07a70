"""Hashes a prompt in parts, so that no full copy of it is made."""

from __future__ import annotations

from array import array

from kvrouter.core import Scope, local_hashes
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest

_PART_TOKENS = 64 << 10
"""Tokens to hash at once, rounded down to whole blocks."""


def hash_prompt(request: FrontendServiceGenerateRequest, block_size: int) -> bytes:
    """Returns the local hashes of a prompt's full blocks, as packed little-endian u64."""
    scope = Scope(request.scope.lora_name, request.scope.cache_salt, request.scope.tenant)
    if request.multimodal_hashes:
        multimodal = [(item.block_index, item.hash) for item in request.multimodal_hashes]
        return local_hashes(array("I", request.token_ids), block_size, scope, multimodal)
    tokens = request.token_ids
    step = max(_PART_TOKENS // block_size, 1) * block_size
    parts = (array("I", tokens[start : start + step]) for start in range(0, len(tokens), step))
    return b"".join(local_hashes(part, block_size, scope) for part in parts)
