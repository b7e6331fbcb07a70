"""Arguments become messages, or errors that name them."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from kvrouter.client import BadRequest
from kvrouter.client.options import GenerateOptions, generate_request, routing_request
from kvrouter.v1.common_pb2 import TokenIds
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest
from kvrouter.v1.worker_pb2 import StopConditions


def test_every_option_reaches_the_message() -> None:
    options = GenerateOptions(
        request_id="r",
        return_text=True,
        stop_conditions={"max_tokens": 7, "min_tokens": 2, "stop_token_ids": [3], "ignore_eos": True, "stop": ["end"]},
        sampling_options={"temperature": 0.0, "top_p": 0.9, "seed": 1, "logprobs": 2},
        router_config_override={"overlap_score_weight": 0.0, "router_temperature": 0.5, "mode": "kv"},
        worker_id=0,
        dp_rank=0,
        migration_limit=0,
        constraints={"excluded_worker_ids": [4], "required_labels": {"zone": "a"}},
        conversation_id="c",
        priority=-1,
        lora_name="l",
        cache_salt="s",
        tenant="t",
        timeout=1.0,
    )
    request = generate_request([1, 2, 3], "m", options)
    assert (request.request_id, request.model, list(request.token_ids.ids)) == ("r", "m", [1, 2, 3])
    assert request.return_text
    assert (request.HasField("migration_limit"), request.migration_limit) == (True, 0)
    assert request.stop_conditions.max_tokens == 7
    assert list(request.stop_conditions.stop) == ["end"]
    assert request.sampling_options.HasField("temperature")
    assert request.sampling_options.seed == 1
    assert request.overrides.HasField("overlap_score_weight")
    assert request.overrides.mode == "kv"
    assert request.constraints.HasField("worker_id")
    assert request.constraints.HasField("dp_rank")
    assert list(request.constraints.excluded_worker_ids) == [4]
    assert request.constraints.required_labels["zone"] == "a"
    assert (request.conversation_id, request.priority) == ("c", -1)
    assert (request.scope.lora_name, request.scope.cache_salt, request.scope.tenant) == ("l", "s", "t")


def test_what_is_not_given_is_not_set() -> None:
    request = generate_request([1], "m", GenerateOptions(router_config_override=None, worker_id=None))
    expected = FrontendServiceGenerateRequest(
        model="m", token_ids=TokenIds(ids=[1]), stop_conditions=StopConditions(max_tokens=16)
    )
    assert request == expected


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 2, 0xFFFFFFFF],
        (1, 2, 0xFFFFFFFF),
        np.array([1, 2, 0xFFFFFFFF], np.int64),
        array("I", [1, 2, 0xFFFFFFFF]),
        np.array([1, 2, 0xFFFFFFFF], np.uint32).tobytes(),
        memoryview(array("I", [1, 2, 0xFFFFFFFF])),
    ],
)
def test_token_ids_may_have_any_form(prompt: Any) -> None:
    assert list(generate_request(prompt, "m", {}).token_ids.ids) == [1, 2, 0xFFFFFFFF]
    assert list(routing_request(prompt, "m", {}).token_ids.ids) == [1, 2, 0xFFFFFFFF]


def test_a_long_buffer_is_read_whole() -> None:
    tokens = np.arange(100_000, dtype=np.uint32)
    assert list(generate_request(tokens.tobytes(), "m", {}).token_ids.ids) == tokens.tolist()


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        (None, {}, "token_ids"),
        ([], {}, "token_ids"),
        (b"", {}, "token_ids"),
        (b"123", {}, "token_ids"),
        ("text", {}, "token_ids"),
        ([-1], {}, "token_ids"),
        ([1 << 32], {}, "token_ids"),
        ([1.5], {}, "token_ids"),
        (["1"], {}, "token_ids"),
        (7, {}, "token_ids"),
        ([1], {"prompt_text": "text"}, "prompt_text"),
        ([1], {"stop_conditions": 7}, "stop_conditions"),
        ([1], {"stop_conditions": {"max_token": 7}}, "stop_conditions.max_token"),
        ([1], {"stop_conditions": {"max_tokens": -7}}, "stop_conditions.max_tokens"),
        ([1], {"stop_conditions": {"stop": ["\ud800"]}}, "stop_conditions.stop"),
        ([1], {"sampling_options": {"temperature": "hot"}}, "sampling_options.temperature"),
        ([1], {"router_config_override": {"weight": 1}}, "router_config_override.weight"),
        ([1], {"constraints": {"allowed_worker_ids": 3}}, "constraints.allowed_worker_ids"),
        ([1], {"worker_id": "first"}, "constraints.worker_id"),
        ([1], {"priority": 1 << 40}, "priority"),
        ([1], {"tenant": 7}, "tenant"),
    ],
)
def test_an_invalid_argument_is_named(prompt: Any, options: Any, field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        generate_request(prompt, "m", options)
    assert refused.value.field == field
    assert refused.value.advice


def test_the_error_of_a_prompt_has_no_token() -> None:
    with pytest.raises(BadRequest) as refused:
        generate_request([-987654321], "m", {})
    assert "987654321" not in f"{refused.value} {refused.value.advice}"


def test_a_model_must_be_named() -> None:
    with pytest.raises(BadRequest) as refused:
        routing_request([1], "", {})
    assert refused.value.field == "model"


def test_an_unknown_keyword_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        generate_request([1], "m", {"max_tokens": 7})  # type: ignore[typeddict-unknown-key]
