"""Hashes the prompt of a request."""

from __future__ import annotations

from kvrouter.core import Scope, local_hashes
from kvrouter.frontend.packed_prompt import TOKEN_BYTES
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest

_HASH_BYTES = 8


def hash_prompt(
    prompt: bytes, request: FrontendServiceGenerateRequest, block_size: int, *, known: bytes = b""
) -> bytes:
    """Returns the local hashes of the full blocks of a request's packed prompt, as packed little-endian u64.

    ``known`` has the hashes of the first blocks, which are not hashed again.
    """
    blocks = len(known) // _HASH_BYTES
    scope = Scope(request.scope.lora_name, request.scope.cache_salt, request.scope.tenant)
    multimodal = [
        (item.block_index - blocks, item.hash) for item in request.multimodal_hashes if item.block_index >= blocks
    ]
    return known + local_hashes(prompt[blocks * block_size * TOKEN_BYTES :], block_size, scope, multimodal)
