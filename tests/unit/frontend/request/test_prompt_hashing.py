"""The hashes of a request are those of its prompt's tokens."""

from __future__ import annotations

import pytest
from kvrouter.core import Scope, local_hashes
from kvrouter.frontend.packed_prompt import hash_prompt, take_prompt, with_content
from kvrouter.v1.common_pb2 import BlockScope, MultimodalHash, TokenIds
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest


@pytest.mark.parametrize("block_size", [1, 16, 48, 1 << 17])
@pytest.mark.parametrize("count", [0, 15, 16, 70_000, 200_001])
def test_a_prompt_has_the_hashes_of_its_tokens(count: int, block_size: int) -> None:
    tokens = [token * 7919 % 128_000 for token in range(count)]
    request = FrontendServiceGenerateRequest(token_ids=TokenIds(ids=tokens), scope=BlockScope(cache_salt="s"))
    prompt = take_prompt(request)
    assert hash_prompt(prompt, request, block_size) == local_hashes(tokens, block_size, Scope("", "s", ""))


def test_multimodal_content_counts() -> None:
    tokens = list(range(100))
    request = FrontendServiceGenerateRequest(
        token_ids=TokenIds(ids=tokens), multimodal_hashes=[MultimodalHash(block_index=2, hash=7)]
    )
    prompt = take_prompt(request)
    assert hash_prompt(prompt, request, 16) == local_hashes(tokens, 16, Scope("", "", ""), [(2, 7)])


@pytest.mark.parametrize("block_size", [1, 16, 48])
def test_the_token_of_multimodal_content_names_its_block_of_any_size(block_size: int) -> None:
    tokens = list(range(100))
    request = FrontendServiceGenerateRequest(token_ids=TokenIds(ids=tokens))
    request.multimodal_hashes.add(token_index=47, hash=7)
    prompt = take_prompt(request)
    hashes = hash_prompt(prompt, request, block_size)
    assert hashes == local_hashes(tokens, block_size, Scope(), [(47 // block_size, 7)])
    assert hash_prompt(prompt, request, block_size, known=hashes[:16]) == hashes


def test_prompts_with_other_content_are_other_prompts() -> None:
    prompt = bytes(range(8))
    seven, eight = MultimodalHash(hash=7), MultimodalHash(hash=8)
    assert with_content(prompt, []) is prompt
    assert len({prompt, *(with_content(prompt, content) for content in ([seven], [eight], [seven, eight]))}) == 4
