"""The HTTP shape of requests and answers."""

from __future__ import annotations

import json
import struct
from array import array
from typing import Any

import pytest
from kvrouter.frontend.access.body_room import BodyTooLarge
from kvrouter.frontend.edge.completion_request import parse_completion
from kvrouter.frontend.edge.frame import ResponseFrame, describe_routing, routing_headers
from kvrouter.frontend.edge.text_request import TextPrompt, TextRequest
from kvrouter.frontend.edge.text_responses import WholeCompletion
from kvrouter.frontend.edge.token_list import TokenPrompt, encode_token_ids
from kvrouter.frontend.generate_request import GenerateRequest, Sampling, StopRules
from kvrouter.frontend.request.routed import Routed
from kvrouter.frontend.text.client_work import completed
from kvrouter.frontend.workers.output import DetailedOutput
from kvrouter.v1.common_pb2 import BlockScope, KvSource, LowerTiers, Rank, RoutingConstraints, RoutingOverrides, Tier
from kvrouter.v1.errors import BadRequest, PromptTooLong
from kvrouter.v1.worker_pb2 import FinishReason, GenerateOutput
from msgspec.structs import replace


def parse(**body: Any) -> TextRequest:
    return read(json.dumps({"model": "m", "prompt": [1, 2, 3], **body}).encode())


def read(body: bytes, *, limit: int = 1000) -> TextRequest:
    return parse_completion(body, max_prompt_tokens=limit)


def prompt_of(request: TextRequest) -> TokenPrompt:
    assert request.plain_prompt is not None
    return request.plain_prompt


def token_ids(request: TextRequest) -> list[int]:
    return array("I", prompt_of(request).token_ids).tolist()


def generated(request: TextRequest) -> GenerateRequest:
    return request.generate_request(request.max_tokens or 0)


def collector(request: TextRequest) -> WholeCompletion:
    return WholeCompletion(ResponseFrame(request, None, [prompt_of(request).token_ids]))


def test_fields_reach_the_contract() -> None:
    completion = parse(
        max_tokens=7,
        stop_token_ids=[9],
        ignore_eos=True,
        temperature=0.5,
        worker_id=3,
        cache_salt="s",
        router_config_override={"overlap_score_weight": 2.0, "active_prefill_tokens_threshold": 9},
    )
    assert token_ids(completion) == [1, 2, 3]
    request = generated(completion)
    assert request.stop == StopRules(7, ignore_eos=True, stop_token_ids=[9])
    assert request.sampling == Sampling(temperature=0.5)
    assert request.constraints == RoutingConstraints(worker_id=3)
    assert request.scope == BlockScope(cache_salt="s")
    assert request.overrides == RoutingOverrides(overlap_score_weight=2.0, active_prefill_tokens_threshold=9)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, -1]}, "prompt.1"),
        ({"prompt": [1 << 32]}, "prompt.0"),
        ({"prompt": [[1, "2"]]}, "prompt.0.1"),
        ({"prompt": [[1], []]}, "prompt.1"),
        ({"prompt": ["a", 1]}, "prompt.1"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["\ud800"]}, "prompt.0"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"n": 1000}, "n"),
        ({"n": 0}, "n"),
        ({"n": 2, "prompt": [[1]] * 65}, "n"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"guided_json": []}, "guided_json"),
        ({"unknown": 1}, "unknown"),
        ({"worker_id": 1 << 64}, "worker_id"),
        ({"router_config_override": {"weight": 1}}, "router_config_override.weight"),
    ],
)
def test_a_wrong_field_is_named(body: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(**body)
    assert caught.value.info.field == field


def test_fields_at_their_defaults_ask_for_nothing() -> None:
    completion = parse(
        logprobs=None,
        echo=False,
        best_of=1,
        max_tokens=None,
        n=1,
        stop=None,
        suffix=None,
        logit_bias=None,
        response_format={"type": "text"},
        user="u",
    )
    assert completion.plain_prompt is not None
    assert generated(completion).stop.max_tokens == 16


def test_a_list_of_prompts_may_have_texts_and_token_ids() -> None:
    request = parse(prompt=[[1, 2], 'a "text" [é]', [3]], n=2)
    assert request.plain_prompt is None
    assert [prompt.field for prompt in request.prompts] == ["prompt", "prompt.1", "prompt"]
    assert isinstance(request.prompts[1], TextPrompt)
    assert request.prompts[1].text == 'a "text" [é]'
    assert array("I", completed(request.prompts[0].slices(None, 10))).tolist() == [1, 2]
    assert request.sequences == 2


def test_a_body_that_is_no_json_is_refused() -> None:
    with pytest.raises(BadRequest):
        read(b'{"model": ')


ROUTING = Routed(request_id="r", rank=Rank(worker_id=5), predicted_overlap_blocks=2, mode="kv")
PIECES = [
    DetailedOutput.of(GenerateOutput(token_ids=[10, 11], cached_tokens=16)),
    DetailedOutput.of(GenerateOutput(token_ids=[12], finish_reason=FinishReason.FINISH_REASON_LENGTH)),
]
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 3,
    "total_tokens": 6,
    "prompt_tokens_details": {"cached_tokens": 16},
}


def whole(request: TextRequest) -> Any:
    completion = collector(request)
    completion.routed(ROUTING)
    for piece in PIECES:
        completion.output(piece)
    return json.loads(completion.body())


def test_usage_tells_the_tiers_of_cached_tokens() -> None:
    found = GenerateOutput(token_ids=[10], cached_tokens=48)
    found.lower_cached_tokens.host, found.lower_cached_tokens.shared = 16, 32
    completion = collector(parse())
    completion.routed(ROUTING)
    completion.output(DetailedOutput.of(found))
    details = json.loads(completion.body())["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 48, "host_cached_tokens": 16, "shared_cached_tokens": 32}
    moved = DetailedOutput.of(found).without("cached_tokens")
    assert (moved.cached_tokens, moved.lower_cached_tokens) == (None, None)


def test_a_response_says_where_more_of_the_prompt_is() -> None:
    routing = replace(ROUTING)
    assert "x-kvrouter-kv-source" not in routing_headers(routing)
    assert not {"kv_source", "predicted_lower_blocks"} & describe_routing(routing).keys()
    routing.kv_source = KvSource(rank=Rank(worker_id=7, dp_rank=1), tier=Tier.TIER_HOST, blocks=12)
    routing.predicted_lower_blocks = LowerTiers(host=1)
    assert routing_headers(routing)["x-kvrouter-kv-source"] == "7:1; tier=host; blocks=12"
    described = describe_routing(routing)
    assert described["kv_source"] == {"worker_id": 7, "dp_rank": 1, "tier": "host", "blocks": 12}
    assert described["predicted_lower_blocks"] == {"host": 1, "disk": 0, "shared": 0}


def test_a_whole_response_has_all_pieces() -> None:
    response = whole(parse(return_token_ids=True))
    (choice,) = response["choices"]
    assert choice["prompt_token_ids"] == [1, 2, 3]
    assert choice["token_ids"] == [10, 11, 12]
    assert choice["finish_reason"] == "length"
    assert response["id"] == "cmpl-r"
    assert response["usage"] == USAGE
    assert response["kvrouter"]["worker_id"] == 5


def test_the_prompt_is_returned_only_on_request() -> None:
    (choice,) = whole(parse())["choices"]
    assert choice["token_ids"] == [10, 11, 12]
    assert "prompt_token_ids" not in choice


def test_cached_tokens_that_are_not_reported_are_unknown() -> None:
    completion = collector(parse())
    completion.routed(ROUTING)
    completion.output(PIECES[1])
    assert json.loads(completion.body())["usage"]["prompt_tokens_details"] is None


def test_a_whole_response_has_no_token_ids_if_none_are_requested() -> None:
    response = whole(parse(return_token_ids=False))
    (choice,) = response["choices"]
    assert not {"token_ids", "prompt_token_ids"} & choice.keys()
    assert response["usage"] == USAGE


MANY = 300_000


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("[" + "[]," * MANY + "1]", "prompt.0"),
        ("[1.5" + ",1.5" * MANY + "]", "prompt.0"),
        ('["a"' + ',"a"' * MANY + "]", "prompt"),
        ("[" + "1," * MANY + "null]", f"prompt.{MANY}"),
        ("[" + "12345," * MANY + "-1]", f"prompt.{MANY}"),
        ("[" + "1," * MANY + '"' + "a," * MANY + '"]', f"prompt.{MANY}"),
        ("[" + "1," * MANY + "[" + "1," * MANY + "1]]", f"prompt.{MANY}"),
        ("[1," + "9" * MANY + "]", "prompt.1"),
        ("[1,1e999]", "prompt.1"),
        ("{" + '"a":1,' * MANY + '"a":1}', "prompt"),
        ("null", "prompt"),
    ],
)
def test_the_first_element_that_is_no_token_is_named(prompt: str, field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(f'{{"model": "m", "prompt": {prompt}}}'.encode(), limit=1 << 20)
    assert caught.value.info.field == field
    assert len(caught.value.message) < 600


@pytest.mark.parametrize(
    "body",
    [
        b"[" * MANY,
        b'{"model": ' + b"[" * MANY + b"]" * MANY + b"}",
        b'{"model": "m", "prompt": [1, NaN]}',
        b'{"model": "m", "prompt": [1,,2]}',
        b'{"model": "m", "prompt": [1,2,]}',
        b'{"model": "m", "prompt": [1 2]}',
        b'{"model": "m", "prompt": [01]}',
        b'{"model": "\xff\xfe", "prompt": [1]}',
        b'{"\xff\xfe": 1, "prompt": [1]}',
        "{}".encode("utf-16"),
        b'{"model": "m", "prompt": [1], "' + b"k" * MANY + b'": 1}',
        b'{"model": "m", "prompt": [1], "cache_salt": "' + b"k" * MANY + b'"}',
        b'{"model": "m", "prompt": [1], "stop_token_ids": [' + b"1," * MANY + b"1]}",
        b'{"model": "m", ' + b'"prompt": [1],' * MANY + b'"prompt": [1]}',
        b"{" + b'"n": 1,' * MANY + b'"model": "m", "prompt": [1]}',
        b"",
    ],
)
def test_a_malformed_body_is_refused(body: bytes) -> None:
    with pytest.raises((BadRequest, BodyTooLarge)) as caught:
        read(body)
    assert caught.value.info.advice
    assert len(caught.value.message) < 600


@pytest.mark.parametrize(
    "layout", [{}, {"separators": (",", ":")}, {"indent": 4}], ids=["default", "compact", "indented"]
)
def test_a_long_prompt_comes_whole(layout: dict[str, Any]) -> None:
    prompt = [(token * 7919) % (1 << 32) for token in range(MANY)]
    request = read(json.dumps({"model": "m", "prompt": prompt}, **layout).encode(), limit=MANY)
    assert token_ids(request) == prompt
    assert json.loads(bytes(prompt_of(request).as_json())) == prompt
    assert b"\n" not in bytes(prompt_of(request).as_json())
    assert json.loads(bytes(encode_token_ids(prompt_of(request).token_ids))) == prompt


def test_white_space_within_a_prompt_is_passed_over() -> None:
    gap = " " * (1 << 18)
    request = read(f'{{"model": "m", "prompt": [{gap}1{gap},2{gap}]}}'.encode())
    assert prompt_of(request).token_ids == struct.pack("<2I", 1, 2)
    assert bytes(prompt_of(read(f'{{"model": "m", "prompt": [{gap}1{gap}]}}'.encode())).as_json()) == b"[1]"
    assert prompt_of(read(b'{"model": "m", "prompt": [ ]}')).token_ids == b""


def test_a_prompt_beyond_the_limit_is_refused_with_its_length() -> None:
    body = json.dumps({"model": "m", "prompt": [7] * MANY}).encode()
    with pytest.raises(PromptTooLong) as caught:
        read(body, limit=MANY - 1)
    assert str(MANY) in caught.value.message
    assert caught.value.info.field == "prompt"


@pytest.mark.parametrize("field", ["seed", "worker_id"])
def test_an_integer_of_64_bits_fits(field: str) -> None:
    assert getattr(parse(**{field: (1 << 64) - 1}).fields, field) == (1 << 64) - 1
    with pytest.raises(BadRequest) as caught:
        parse(**{field: 1 << 64})
    assert caught.value.info.field == field


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "a", "prompt": [1], "model": "b"}',
        b'{"prompt": "text", "model": "m", "prompt": [1]}',
        b'{"prompt": [1], "pro\\u006dpt": [2], "model": "m"}',
        b'{"pro\\u006dpt": [2], "prompt": [1], "model": "m"}',
    ],
)
def test_a_field_that_comes_twice_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match="twice"):
        read(body)


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        (b'{"pro\\u006dpt": [2], "model": "m"}', [2]),
        (b'{"cache_salt": "\\"prompt\\": [3]", "prompt": [1], "model": "m"}', [1]),
        (b'{"user": "{", "prompt": [1], "model": "m", "cache_salt": "}"}', [1]),
    ],
)
def test_the_prompt_of_the_body_is_found(body: bytes, prompt: list[int]) -> None:
    assert token_ids(read(body)) == prompt


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m", "prompt": [1], "prompt": 5}',
        b'{"model": "m", "prompt": [1]]}',
        b'{"model": "m", "prompt": [1}',
        b'{"model": "m", "prompt": [1]',
        b'{"model": "m", "prompt": [1] "n": 1}',
        b'{"model": "m", "stream_options": {"prompt": [1]}}',
        b'[{"model": "m", "prompt": [1]}]',
    ],
)
def test_a_body_around_a_prompt_must_be_valid(body: bytes) -> None:
    with pytest.raises(BadRequest):
        read(body)
