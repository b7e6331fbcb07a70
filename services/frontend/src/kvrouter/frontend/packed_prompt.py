"""Converts prompts between requests and packed buffers, without a Python number for each token.

A packed buffer has 4 bytes for each token, little-endian, which is the packed encoding of ``repeated fixed32``. So the
encoding of a request is decoded as its twin (``packed.proto``), and the other way round.
"""

from __future__ import annotations

from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest
from kvrouter.v1.packed_pb2 import PackedPrompt


def packed_prompt(request: FrontendServiceGenerateRequest) -> bytes:
    """Returns the prompt of a request as a packed buffer."""
    return PackedPrompt.FromString(request.SerializeToString()).token_ids


def add_packed_prompt(request: FrontendServiceGenerateRequest, tokens: bytes) -> None:
    """Appends the tokens of a packed buffer to the prompt of a request."""
    request.MergeFromString(PackedPrompt(token_ids=tokens).SerializeToString())
