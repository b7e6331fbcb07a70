"""Validation of requests, with typed errors and their correction, and encoding of responses."""

from __future__ import annotations

from kvrouter.core import Scope
from kvrouter.net.varint import encode_varint
from kvrouter.v1.common_pb2 import BlockScope
from kvrouter.v1.errors import BadRequest, BlockSizeMismatch, PromptTooLong
from kvrouter.v1.indexer_pb2 import DumpResponse, FindMatchesRequest

_MAX_SCOPE_BYTES = 1024
_MAX_MULTIMODAL_HASHES = 4096
_STATE_TAG = DumpResponse.STATE_FIELD_NUMBER << 3 | 2


def scope_of(scope: BlockScope) -> Scope:
    """Converts a BlockScope message to the core's Scope.

    Raises:
        BadRequest: a name in it is longer than 1,024 bytes.
    """
    for field in ("lora_name", "cache_salt", "tenant"):
        if len(getattr(scope, field).encode()) > _MAX_SCOPE_BYTES:
            raise BadRequest(
                f"scope.{field} is too long", field=f"scope.{field}", advice=f"Use at most {_MAX_SCOPE_BYTES} bytes."
            )
    return Scope(scope.lora_name, scope.cache_salt, scope.tenant)


def check_prompt(request: FindMatchesRequest, block_size: int, max_prompt_tokens: int) -> None:
    """Checks the prompt of a FindMatches request.

    Raises:
        BadRequest: the request has no prompt, or more than 4,096 multimodal hashes.
        BlockSizeMismatch: the request names another block size than the component's.
        PromptTooLong: the prompt has more than ``max_prompt_tokens`` tokens.
    """
    if request.block_size not in (0, block_size):
        raise BlockSizeMismatch(request.block_size, block_size)
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise BadRequest("the request has no prompt", field="prompt", advice="Set token_ids or local_hashes.")
    tokens = len(request.token_ids.ids) if kind == "token_ids" else len(request.local_hashes.hashes) * block_size
    if tokens > max_prompt_tokens:
        raise PromptTooLong(tokens, max_prompt_tokens)
    if len(request.multimodal_hashes) > _MAX_MULTIMODAL_HASHES:
        raise BadRequest(
            f"expected at most {_MAX_MULTIMODAL_HASHES} multimodal hashes, received {len(request.multimodal_hashes)}",
            field="multimodal_hashes",
            advice=f"Send at most {_MAX_MULTIMODAL_HASHES}.",
        )


def encoded_dump_response(state: bytes) -> bytes:
    """Returns an encoded DumpResponse with an encoded RankState, which would cost far more to parse."""
    return b"".join((bytes([_STATE_TAG]), encode_varint(len(state)), state))
