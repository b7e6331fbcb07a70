"""Hashes the prompt of a request."""

from __future__ import annotations

from kvrouter.core import Scope, local_hashes
from kvrouter.frontend.packed_prompt import packed_prompt
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest


def hash_prompt(request: FrontendServiceGenerateRequest, block_size: int) -> bytes:
    """Returns the local hashes of a prompt's full blocks, as packed little-endian u64."""
    scope = Scope(request.scope.lora_name, request.scope.cache_salt, request.scope.tenant)
    multimodal = [(item.block_index, item.hash) for item in request.multimodal_hashes]
    return local_hashes(packed_prompt(request), block_size, scope, multimodal)
