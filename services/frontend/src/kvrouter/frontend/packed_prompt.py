"""Converts prompts between requests and packed buffers, without a Python number for each token.

A packed buffer has 4 bytes for each token, little-endian, which is the packed encoding of ``repeated fixed32``. So the
encoding of a request is decoded as its twin (``packed.proto``), and the other way round. Inside the Frontend a prompt
is a packed buffer, and its request has no token ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvrouter.core import Scope, local_hashes
from kvrouter.frontend.generate_request import GenerateRequest
from kvrouter.net.wire_format import encode_varint, tag
from kvrouter.runtime.requests import content_in_blocks
from kvrouter.v1.common_pb2 import MultimodalHash
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest
from kvrouter.v1.packed_pb2 import PackedPrompt
from kvrouter.v1.worker_pb2 import WorkerServiceGenerateRequest

TOKEN_BYTES = 4
_PROMPT_TAG = tag(WorkerServiceGenerateRequest, "token_ids")


def take_prompt(request: FrontendServiceGenerateRequest) -> bytes:
    """Removes the prompt from a request and returns it as a packed buffer."""
    prompt = PackedPrompt.FromString(request.SerializeToString()).token_ids.ids
    request.ClearField("token_ids")
    return prompt


def encode_with_prompt(request: WorkerServiceGenerateRequest, prompt: bytes) -> bytes:
    """Returns the encoding of a request that has no token ids with those of a packed buffer."""
    # Joined here, since a protobuf message copies the prompt twice more.
    size = encode_varint(len(prompt))
    return b"".join((request.SerializeToString(), _PROMPT_TAG, size, prompt))


_HASH_BYTES = 8
_SHARED = Scope()
"""The scope of blocks that all requests share."""


def hash_prompt(prompt: bytes, request: GenerateRequest, block_size: int, *, known: bytes = b"") -> bytes:
    """Returns the local hashes of the full blocks of a request's packed prompt, as packed little-endian u64.

    ``known`` has the hashes of the first blocks, which are not hashed again.
    """
    blocks = len(known) // _HASH_BYTES
    scope = _SHARED
    if (given := request.scope) is not None:
        scope = Scope(given.lora_name, given.cache_salt, given.tenant)
    multimodal = content_in_blocks(request.multimodal_hashes, block_size) if request.multimodal_hashes else []
    if blocks:
        multimodal = [(block - blocks, content_hash) for block, content_hash in multimodal if block >= blocks]
    return known + local_hashes(prompt[blocks * block_size * TOKEN_BYTES :], block_size, scope, multimodal)


def with_content(prompt: bytes, content: Sequence[MultimodalHash]) -> bytes:
    """Returns a packed prompt with the hashes of its multimodal content at its end: equal for equal prompts only."""
    return prompt + array("Q", (item.hash for item in content)).tobytes() if content else prompt
