"""Hashes the prompt of a request."""

from __future__ import annotations

from kvrouter.core import Scope, local_hashes
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest


def hash_prompt(prompt: bytes, request: FrontendServiceGenerateRequest, block_size: int) -> bytes:
    """Returns the local hashes of the full blocks of a request's packed prompt, as packed little-endian u64."""
    scope = Scope(request.scope.lora_name, request.scope.cache_salt, request.scope.tenant)
    multimodal = [(item.block_index, item.hash) for item in request.multimodal_hashes]
    return local_hashes(prompt, block_size, scope, multimodal)
