"""The hashes of a request are those of its prompt's tokens."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from kvrouter.core import Scope, local_hashes
from kvrouter.frontend.generate_request import GenerateRequest, StopRules
from kvrouter.frontend.packed_prompt import hash_prompt, with_content
from kvrouter.v1.common_pb2 import BlockScope, MultimodalHash


def asked(**fields: Any) -> GenerateRequest:
    return GenerateRequest(model="m", stop=StopRules(1), **fields)


def packed(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


@pytest.mark.parametrize("block_size", [1, 16, 48, 1 << 17])
@pytest.mark.parametrize("count", [0, 15, 16, 70_000, 200_001])
def test_a_prompt_has_the_hashes_of_its_tokens(count: int, block_size: int) -> None:
    tokens = [token * 7919 % 128_000 for token in range(count)]
    request = asked(scope=BlockScope(cache_salt="s"))
    assert hash_prompt(packed(tokens), request, block_size) == local_hashes(tokens, block_size, Scope("", "s", ""))


def test_multimodal_content_counts() -> None:
    tokens = list(range(100))
    request = asked(multimodal_hashes=[MultimodalHash(block_index=2, hash=7)])
    assert hash_prompt(packed(tokens), request, 16) == local_hashes(tokens, 16, Scope("", "", ""), [(2, 7)])


@pytest.mark.parametrize("block_size", [1, 16, 48])
def test_the_token_of_multimodal_content_names_its_block_of_any_size(block_size: int) -> None:
    tokens = list(range(100))
    request = asked(multimodal_hashes=[MultimodalHash(token_index=47, hash=7)])
    prompt = packed(tokens)
    hashes = hash_prompt(prompt, request, block_size)
    assert hashes == local_hashes(tokens, block_size, Scope(), [(47 // block_size, 7)])
    assert hash_prompt(prompt, request, block_size, known=hashes[:16]) == hashes


def test_prompts_with_other_content_are_other_prompts() -> None:
    prompt = bytes(range(8))
    seven, eight = MultimodalHash(hash=7), MultimodalHash(hash=8)
    assert with_content(prompt, []) is prompt
    assert len({prompt, *(with_content(prompt, content) for content in ([seven], [eight], [seven, eight]))}) == 4
