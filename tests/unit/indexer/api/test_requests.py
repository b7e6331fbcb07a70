from __future__ import annotations

import pytest
from kvrouter.indexer.api.service import check_prompt, encoded_dump_response, scope_of
from kvrouter.runtime.requests import component_name
from kvrouter.v1.common_pb2 import BlockRecord, BlockScope, Component, LocalHashes, MultimodalHash, RankState, TokenIds
from kvrouter.v1.errors import BadRequest, BlockSizeMismatch, PromptTooLong
from kvrouter.v1.indexer_pb2 import DumpResponse, FindMatchesRequest
from kvrouter.v1.names import ComponentName


def test_component_names() -> None:
    assert component_name(Component(namespace="a", name="b")) == ComponentName("a", "b")
    with pytest.raises(BadRequest, match="expected a name"):
        component_name(Component(namespace="a", name="b.c"))
    with pytest.raises(BadRequest):
        component_name(Component())


def test_a_prompt_must_be_there() -> None:
    with pytest.raises(BadRequest) as caught:
        check_prompt(FindMatchesRequest(), 16, 100)
    assert caught.value.info.field == "prompt"


def test_an_empty_prompt_is_one_of_no_blocks() -> None:
    check_prompt(FindMatchesRequest(token_ids=TokenIds()), 16, 100)
    check_prompt(FindMatchesRequest(local_hashes=LocalHashes()), 16, 100)


def test_a_block_size_in_the_request_must_equal_the_components() -> None:
    check_prompt(FindMatchesRequest(local_hashes=LocalHashes(), block_size=16), 16, 100)
    for block_size in (0, 32):
        with pytest.raises(BlockSizeMismatch) as caught:
            check_prompt(FindMatchesRequest(local_hashes=LocalHashes(), block_size=block_size), 16, 100)
        assert list(caught.value.info.known_values) == ["16"]


@pytest.mark.parametrize(
    "request_",
    [
        FindMatchesRequest(token_ids=TokenIds(ids=range(101))),
        FindMatchesRequest(local_hashes=LocalHashes(hashes=range(7))),
    ],
)
def test_the_prompt_has_a_limit(request_: FindMatchesRequest) -> None:
    check_prompt(request_, 16, 112)
    with pytest.raises(PromptTooLong):
        check_prompt(request_, 16, 100)


def test_scope_and_multimodal_hashes_have_limits() -> None:
    with pytest.raises(BadRequest) as caught:
        scope_of(BlockScope(cache_salt="s" * 1025))
    assert caught.value.info.field == "scope.cache_salt"
    many = FindMatchesRequest(token_ids=TokenIds(), multimodal_hashes=[MultimodalHash()] * 4097)
    with pytest.raises(BadRequest):
        check_prompt(many, 16, 100)


@pytest.mark.parametrize("blocks", [0, 1, 40, 3000])
def test_a_state_is_wrapped_into_a_dump_response_without_parsing_it(blocks: int) -> None:
    state = RankState(blocks=[BlockRecord(engine_hash=number + 1) for number in range(blocks)], last=True)
    assert DumpResponse.FromString(encoded_dump_response(state.SerializeToString())) == DumpResponse(state=state)
