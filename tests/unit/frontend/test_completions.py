"""The HTTP shape of requests and answers."""

import json
from typing import Any

import pytest
from kvrouter.frontend.completions import Completion, CompletionRequest
from kvrouter.runtime.errors import BadRequest
from kvrouter.v1.common_pb2 import Rank
from kvrouter.v1.frontend_pb2 import RoutingInfo
from kvrouter.v1.worker_pb2 import FinishReason, GenerateOutput


def parse(**body: Any) -> CompletionRequest:
    return CompletionRequest.parse(json.dumps({"model": "m", "prompt": [1, 2, 3], **body}).encode())


def test_fields_reach_the_contract() -> None:
    request = parse(
        max_tokens=7,
        stop_token_ids=[9],
        ignore_eos=True,
        temperature=0.5,
        worker_id=3,
        cache_salt="s",
        router_config_override={"overlap_score_weight": 2.0, "active_prefill_tokens_threshold": 9},
    ).to_generate()
    assert list(request.token_ids) == [1, 2, 3]
    assert request.stop_conditions.max_tokens == 7
    assert list(request.stop_conditions.stop_token_ids) == [9]
    assert request.sampling_options.temperature == 0.5
    assert not request.sampling_options.HasField("top_p")
    assert request.constraints.worker_id == 3
    assert not request.constraints.HasField("dp_rank")
    assert request.scope.cache_salt == "s"
    assert request.overrides.overlap_score_weight == 2.0
    assert not request.overrides.HasField("router_temperature")
    assert request.overrides.active_prefill_tokens_threshold == 9
    assert not request.overrides.HasField("active_decode_blocks_threshold")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": "text"}, "prompt"),
        ({"prompt": [1, -1]}, "prompt.1"),
        ({"prompt": [1 << 32]}, "prompt.0"),
        ({"prompt": [[1, 2]]}, "prompt.0"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"echo": True}, "echo"),
        ({"worker_id": 1 << 64}, "worker_id"),
        ({"router_config_override": {"weight": 1}}, "router_config_override.weight"),
    ],
)
def test_a_wrong_field_is_named(body: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(**body)
    assert caught.value.info.field == field


def test_a_text_prompt_is_told_what_to_send() -> None:
    with pytest.raises(BadRequest) as caught:
        parse(prompt="hello")
    assert "token ids" in caught.value.info.advice


def test_a_body_that_is_no_json_is_refused() -> None:
    with pytest.raises(BadRequest):
        CompletionRequest.parse(b'{"model": ')


def test_pieces_add_up() -> None:
    completion = Completion(parse())
    routing = RoutingInfo(request_id="r", rank=Rank(worker_id=5), predicted_overlap_blocks=2, mode="kv")
    first = completion.add(GenerateOutput(token_ids=[10, 11], cached_tokens=16), routing)
    last = completion.add(GenerateOutput(token_ids=[12], finish_reason=FinishReason.FINISH_REASON_LENGTH), None)
    assert first["choices"][0]["token_ids"] == [10, 11]
    assert first["choices"][0]["prompt_token_ids"] == [1, 2, 3]
    assert first["choices"][0]["finish_reason"] is None
    assert "prompt_token_ids" not in last["choices"][0]
    assert last["choices"][0]["finish_reason"] == "length"
    whole = completion.whole()
    assert whole["id"] == "cmpl-r"
    assert whole["choices"][0]["token_ids"] == [10, 11, 12]
    assert whole["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    assert whole["kvrouter"]["worker_id"] == 5
