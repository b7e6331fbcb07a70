"""Reads requests: what is asked for, or a typed error that says what to correct."""

from __future__ import annotations

from kvrouter.core import Scope
from kvrouter.runtime.errors import BadRequest, BlockSizeMismatch, PromptTooLong
from kvrouter.v1.common_pb2 import BlockScope
from kvrouter.v1.indexer_pb2 import FindMatchesRequest

_MAX_SCOPE_BYTES = 1024
_MAX_MULTIMODAL_HASHES = 4096


def scope_of(scope: BlockScope) -> Scope:
    """What besides its tokens decides whether a block may be shared.

    Raises:
        BadRequest: a name in it is longer than 1,024 bytes.
    """
    for field in ("lora_name", "cache_salt", "tenant"):
        if len(getattr(scope, field).encode()) > _MAX_SCOPE_BYTES:
            raise BadRequest(
                f"scope.{field} is too long", field=f"scope.{field}", advice=f"Use {_MAX_SCOPE_BYTES} bytes at most."
            )
    return Scope(scope.lora_name, scope.cache_salt, scope.tenant)


def check_prompt(request: FindMatchesRequest, block_size: int, max_prompt_tokens: int) -> None:
    """Checks the prompt of a FindMatches request.

    Raises:
        BadRequest: there is no prompt, or there are too many multimodal hashes.
        BlockSizeMismatch: the caller reckons with another block size.
        PromptTooLong: it has more tokens than the limit.
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
            f"{len(request.multimodal_hashes)} multimodal hashes",
            field="multimodal_hashes",
            advice=f"Send {_MAX_MULTIMODAL_HASHES} at most.",
        )
