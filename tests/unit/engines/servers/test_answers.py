"""What engines answer becomes outputs, errors of the request, or failures of the engine."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest
from hypothesis import given, strategies as st
from kvrouter.engines.servers.api import OutputReader
from kvrouter.engines.servers.description import Discovered, EngineDescription, Overrides, describe
from kvrouter.engines.servers.failures import EngineFailed, refusal_of_status
from kvrouter.engines.servers.http import EventStream
from kvrouter.engines.servers.sglang.api import Loads, read_loads, read_metrics
from kvrouter.engines.servers.sglang.requests import GenerateReader, call as sglang_call
from kvrouter.engines.servers.vllm.api import read_loads as read_vllm_loads
from kvrouter.engines.servers.vllm.requests import CompletionReader, call as vllm_call
from kvrouter.publisher.errors import RequestRefused
from kvrouter.v1.common_pb2 import BlockScope, LowerTiers, Stage
from kvrouter.v1.worker_pb2 import (
    ChoiceOutput,
    FinishReason,
    GenerateOutput,
    SamplingOptions,
    StopConditions,
    StructuredOutput,
    TransferParams,
    WorkerServiceGenerateRequest,
)


def read(reader: OutputReader, *events: Any) -> list[GenerateOutput]:
    outputs = [output for event in events for output in reader.read(_data(event))]
    return [*outputs, *reader.end()]


def _data(event: Any) -> bytes:
    return event if isinstance(event, bytes) else json.dumps(event).encode()


def chunk(*tokens: int, **choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "x", "token_ids": list(tokens), **choice}]}


def state(*tokens: int, finish: Any = None, **meta: Any) -> dict[str, Any]:
    return {"text": "x", "output_ids": list(tokens), "meta_info": {"finish_reason": finish, **meta}}


def engine(**values: Any) -> EngineDescription:
    known: dict[str, Any] = {"model": "m", "block_size": 4, "ranks": {0: 10}}
    return describe("http://e", "e", Discovered("vllm", **(known | values)), Overrides(kv_events="none"))


def request(**fields: Any) -> WorkerServiceGenerateRequest:
    known: dict[str, Any] = {
        "request_id": "r",
        "token_ids": [1, 2],
        "stop_conditions": StopConditions(max_tokens=8),
    }
    return WorkerServiceGenerateRequest(**(known | fields))


def tokens(outputs: list[GenerateOutput]) -> list[list[int]]:
    return [list(output.token_ids) for output in outputs]


def test_a_completion() -> None:
    usage = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 0}}}
    outputs = read(CompletionReader(), chunk(1), chunk(2, 3), chunk(4, finish_reason="length"), usage)
    assert tokens(outputs) == [[1], [2, 3], [4]]
    assert outputs[-1].finish_reason == FinishReason.FINISH_REASON_LENGTH
    assert outputs[-1].cached_tokens == 0
    assert outputs[-1].HasField("cached_tokens")


@pytest.mark.parametrize("usage", [{}, {"usage": None}, {"usage": {"prompt_tokens_details": None}}])
def test_cached_tokens_that_vllm_does_not_report_are_unknown(usage: dict[str, Any]) -> None:
    (last,) = read(CompletionReader(), chunk(1, finish_reason="stop"), {"choices": [], **usage})
    assert not last.HasField("cached_tokens")


@pytest.mark.parametrize(
    "events",
    [
        [state(1), state(1, 2, 3), state(1, 2, 3, 4, finish={"type": "length"})],
        [
            state(1, completion_tokens=1),
            state(1, 2, 3, completion_tokens=3),
            state(1, 2, 3, 4, completion_tokens=4, finish={"type": "length"}),
        ],
        [
            state(1, completion_tokens=1),
            state(2, 3, completion_tokens=3),
            state(4, completion_tokens=4, finish={"type": "length"}),
        ],
    ],
)
def test_cumulative_and_incremental_token_ids(events: list[Any]) -> None:
    outputs = read(GenerateReader(), *events)
    assert tokens(outputs) == [[1], [2, 3], [4]]
    assert outputs[-1].finish_reason == FinishReason.FINISH_REASON_LENGTH


@pytest.mark.parametrize(
    ("details", "lower"),
    [
        ({"device": 8, "host": 4}, LowerTiers(host=4)),
        ({"device": 8, "host": 4, "storage": 2, "storage_backend": "x"}, LowerTiers(host=4, shared=2)),
        ({"device": 8, "host": 0}, None),
        (None, None),
    ],
)
def test_sglang_says_what_it_loaded_from_which_tier(details: Any, lower: LowerTiers | None) -> None:
    said = state(1, finish={"type": "stop"}, cached_tokens=14, cached_tokens_details=details)
    (output,) = read(GenerateReader(), said)
    assert (output.lower_cached_tokens if output.HasField("lower_cached_tokens") else None) == lower


def test_cached_tokens_of_sglang_come_first() -> None:
    outputs = read(GenerateReader(), state(1, cached_tokens=8), state(1, 2, finish={"type": "stop"}, cached_tokens=8))
    assert [output.cached_tokens for output in outputs if output.HasField("cached_tokens")] == [8]
    assert outputs[0].HasField("cached_tokens")


def test_log_probabilities() -> None:
    first, _ = read(CompletionReader(), chunk(1, logprobs={"token_logprobs": [-0.5]}), chunk(2, finish_reason="stop"))
    assert list(first.logprobs) == [-0.5]
    probabilities = [[-0.5, 1, None], [-0.25, 2, None]]
    _, last = read(
        GenerateReader(),
        state(1, output_token_logprobs=probabilities[:1]),
        state(1, 2, finish={"type": "stop"}, output_token_logprobs=probabilities),
    )
    assert list(last.logprobs) == [-0.25]


def test_the_most_likely_tokens() -> None:
    top: list[dict[str, float] | None] = [None, {"token_id:7": -2.0, "token_id:1": -0.5, "text": -3.0}]
    first, _ = read(
        CompletionReader(),
        chunk(1, 1, logprobs={"token_logprobs": [None, -0.5], "top_logprobs": top}),
        chunk(2, finish_reason="stop"),
    )
    assert [list(each.token_ids) for each in first.top_logprobs] == [[], [1, 7]]
    assert list(first.top_logprobs[1].logprobs) == [-0.5, -2.0]
    entries = [[[-0.5, 1, None], [-2.0, 7, "x"]], [[-0.25, 2, None]]]
    _, last = read(
        GenerateReader(),
        state(1, output_top_logprobs=entries[:1]),
        state(1, 2, finish={"type": "stop"}, output_top_logprobs=entries),
    )
    assert [list(each.token_ids) for each in last.top_logprobs] == [[2]]


SCHEMA = '{"type": "object"}'
CONSTRAINTS: list[tuple[StructuredOutput, dict[str, Any], dict[str, Any]]] = [
    (
        StructuredOutput(json_schema=SCHEMA),
        {"json": {"type": "object"}},
        {"json_schema": '{"type":"object"}'},
    ),
    (StructuredOutput(json_object=True), {"json_object": True}, {"json_schema": '{"type":"object"}'}),
    (StructuredOutput(regex="a+"), {"regex": "a+"}, {"regex": "a+"}),
    (
        StructuredOutput(choice=ChoiceOutput(texts=["a.b", "c d"])),
        {"choice": ["a.b", "c d"]},
        {"regex": r"(a\.b)|(c d)"},
    ),
    (StructuredOutput(grammar="root ::= x"), {"grammar": "root ::= x"}, {"ebnf": "root ::= x"}),
]


@pytest.mark.parametrize(("constraint", "of_vllm", "of_sglang"), CONSTRAINTS)
def test_a_structured_output_is_requested_in_the_fields_of_each_engine(
    constraint: StructuredOutput, of_vllm: dict[str, Any], of_sglang: dict[str, Any]
) -> None:
    sent = request(sampling_options=SamplingOptions(structured_output=constraint, logprobs=3))
    completion = json.loads(vllm_call(sent, engine()).body)
    assert completion["structured_outputs"] == of_vllm
    assert completion["logprobs"] == 2
    generate = json.loads(sglang_call(sent, engine()).body)
    assert of_sglang.items() <= generate["sampling_params"].items()
    assert generate["top_logprobs_num"] == 2


@pytest.mark.parametrize("constraint", [StructuredOutput(), StructuredOutput(json_schema="{")])
def test_a_constraint_that_says_nothing_is_refused(constraint: StructuredOutput) -> None:
    sent = request(sampling_options=SamplingOptions(structured_output=constraint))
    for call in (vllm_call, sglang_call):
        with pytest.raises(RequestRefused, match="expected a"):
            call(sent, engine())


@pytest.mark.parametrize(
    "event",
    [
        b"<html>",
        b'"text"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"x":' * 100_000,
        {"choices": [{"token_ids": [-1]}], "output_ids": [-1]},
        {"choices": [{"token_ids": [1 << 40]}], "output_ids": [1 << 40]},
        {"choices": [{"text": "no ids"}], "text": "no ids"},
        {"error": {"message": "boom"}},
        {"error": {"message": "boom", "code": 500}},
        {"error": "boom"},
        {"object": "error", "message": "boom"},
        {"error": [1]},
    ],
)
@pytest.mark.parametrize("kind", [CompletionReader, GenerateReader])
def test_malformed_answers_and_errors_without_a_fault_are_the_engines(kind: Any, event: Any) -> None:
    with pytest.raises(EngineFailed):
        read(kind(), event)


@pytest.mark.parametrize("kind", [CompletionReader, GenerateReader])
def test_an_answer_that_ends_early_is_the_engines_failure(kind: Any) -> None:
    with pytest.raises(EngineFailed, match="before the request was finished"):
        read(kind(), chunk(1) | state(1))


@pytest.mark.parametrize("kind", [CompletionReader, GenerateReader])
def test_an_error_with_status_200_may_be_the_requests_fault(kind: Any) -> None:
    with pytest.raises(RequestRefused) as caught:
        read(kind(), {"error": {"message": "too long", "code": 400}})
    assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT
    assert "too long" in str(caught.value)


def test_an_abort_of_sglang_with_a_status_is_an_error() -> None:
    with pytest.raises(RequestRefused) as caught:
        read(GenerateReader(), state(finish={"type": "abort", "message": "too long", "status_code": 400}))
    assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(EngineFailed):
        read(GenerateReader(), state(finish={"type": "abort", "message": "full", "status_code": 503}))
    (last,) = read(GenerateReader(), state(finish={"type": "abort", "message": "aborted"}))
    assert last.finish_reason == FinishReason.FINISH_REASON_ABORT


@pytest.mark.parametrize(
    ("status", "body", "code", "elsewhere"),
    [
        (400, {"error": {"message": "bad"}}, grpc.StatusCode.INVALID_ARGUMENT, False),
        (404, {"error": {"message": "no model"}}, grpc.StatusCode.INVALID_ARGUMENT, False),
        (422, {"detail": "bad"}, grpc.StatusCode.INVALID_ARGUMENT, False),
        (404, {"detail": "Not Found"}, grpc.StatusCode.FAILED_PRECONDITION, True),
        (401, {}, grpc.StatusCode.FAILED_PRECONDITION, True),
        (429, {}, grpc.StatusCode.RESOURCE_EXHAUSTED, True),
        (500, {"error": {"message": "boom"}}, grpc.StatusCode.UNAVAILABLE, True),
        (503, {}, grpc.StatusCode.UNAVAILABLE, True),
        (302, {}, grpc.StatusCode.UNAVAILABLE, True),
    ],
)
def test_a_status_tells_whose_fault_it_is(status: int, body: Any, code: grpc.StatusCode, elsewhere: bool) -> None:
    refusal = refusal_of_status(status, json.dumps(body).encode())
    assert (refusal.code, refusal.info.retry_elsewhere) == (code, elsewhere)


def test_what_an_engine_says_of_its_failure_is_not_logged() -> None:
    refusal = refusal_of_status(500, b'{"error": {"message": "secret prompt"}}')
    assert isinstance(refusal, EngineFailed)
    assert "secret prompt" in str(refusal)
    assert "secret prompt" not in refusal.summary


@given(st.lists(st.binary(min_size=1).filter(lambda data: not {10, 13} & set(data))), st.data())
def test_events_are_split_wherever_their_bytes_are(events: list[bytes], data: st.DataObject) -> None:
    ends = data.draw(st.lists(st.sampled_from([b"\n\n", b"\r\n\r\n"]), min_size=len(events), max_size=len(events)))
    sent = b"".join(b"data: " + event + end for event, end in zip(events, ends, strict=True))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=5)))
    stream, received = EventStream(), []
    for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
        received += stream.feed(sent[start:end])
    assert received == events


def test_comments_and_other_fields_of_an_event_stream_are_ignored() -> None:
    assert EventStream().feed(b": ping\n\nevent: x\ndata: 1\ndata: 2\n\n") == [b"1\n2"]


def test_a_request_to_vllm() -> None:
    sent = request(
        priority=2,
        dp_rank=1,
        scope=BlockScope(lora_name="a", cache_salt="s"),
        sampling_options=SamplingOptions(top_k=0, engine_options_json='{"guided_json": {}}'),
    )
    made = vllm_call(sent, engine(ranks={0: 1, 1: 1}))
    body = json.loads(made.body)
    assert (made.path, made.headers) == ("/v1/completions", {"X-data-parallel-rank": "1"})
    assert body["prompt"] == [1, 2]
    assert body["guided_json"] == {}
    assert (body["model"], body["cache_salt"], body["priority"], body["top_k"]) == ("a", "s", 2, -1)
    assert (body["max_tokens"], body["stream"], body["return_token_ids"]) == (8, True, True)
    assert "temperature" not in body


def test_a_request_to_sglang() -> None:
    sent = request(priority=2, dp_rank=1, scope=BlockScope(lora_name="a", tenant="t"))
    made = sglang_call(sent, engine(ranks={0: 1, 1: 1}, smaller_priority_first=False))
    assert json.loads(sglang_call(sent, engine()).body)["priority"] == 2
    body = json.loads(made.body)
    assert made.path == "/generate"
    assert body["input_ids"] == [1, 2]
    assert (body["lora_path"], body["cache_salt"], body["priority"]) == ("a", "tenant:t:", -2)
    assert (body["routed_dp_rank"], body["sampling_params"]["max_new_tokens"]) == (1, 8)
    assert body["rid"] == made.engine_id


@pytest.mark.parametrize("name", ["cache_salt", "kv_transfer_params", "prompt", "n", "model", "request_id", "priority"])
def test_options_that_the_sidecar_sets_are_not_the_clients_at_vllm(name: str) -> None:
    options = SamplingOptions(engine_options_json=json.dumps({name: "x"}))
    with pytest.raises(RequestRefused, match=name):
        vllm_call(request(sampling_options=options), engine())


@pytest.mark.parametrize("name", ["max_new_tokens", "n"])
def test_options_that_the_sidecar_sets_are_not_the_clients_at_sglang(name: str) -> None:
    options = SamplingOptions(engine_options_json=json.dumps({name: 9}))
    with pytest.raises(RequestRefused, match=name):
        sglang_call(request(sampling_options=options), engine())


def test_ids_at_sglang_are_no_prefixes_of_each_other() -> None:
    ids = {sglang_call(request(), engine()).engine_id for _ in range(50)}
    assert len(ids) == 50
    assert len({len(each) for each in ids}) == 1


def test_prefill_and_decode_meet_at_sglangs_bootstrap_address() -> None:
    prefill = engine(role="prefill", bootstrap_port=8998)
    made = sglang_call(request(stage=Stage.STAGE_PREFILL), prefill)
    assert made.early is not None
    parameters = json.loads(made.early.transfer_params.payload)
    assert (parameters["bootstrap_host"], parameters["bootstrap_port"]) == ("e", 8998)
    body = json.loads(made.body)
    assert parameters.items() <= body.items()
    assert body["sampling_params"]["max_new_tokens"] == 1
    decode = request(stage=Stage.STAGE_DECODE, transfer_params=made.early.transfer_params)
    assert parameters.items() <= json.loads(sglang_call(decode, engine()).body).items()


@pytest.mark.parametrize("call", [vllm_call, sglang_call])
@pytest.mark.parametrize("parameters", [TransferParams(format="other", payload=b"{}"), TransferParams(payload=b"[")])
def test_unknown_transfer_parameters_are_refused(call: Any, parameters: TransferParams) -> None:
    with pytest.raises(RequestRefused):
        call(request(stage=Stage.STAGE_DECODE, transfer_params=parameters), engine())


def vllm_page(**values: str) -> bytes:
    names = {"running": "num_requests_running", "waiting": "num_requests_waiting", "usage": "kv_cache_usage_perc"}
    return "\n".join(f'vllm:{names[name]}{{engine="0"}} {value}' for name, value in values.items()).encode()


def test_the_load_of_vllm() -> None:
    loads, unusable = read_vllm_loads(vllm_page(running="3.0", waiting="1.0", usage="0.5"), {0: 10})
    assert unusable == 0
    assert (loads[0].running_requests, loads[0].waiting_requests, loads[0].active_blocks) == (3, 1, 5)


@pytest.mark.parametrize(
    "page",
    [
        vllm_page(running="NaN", waiting="1", usage="0.5"),
        vllm_page(running="+Inf", waiting="1", usage="0.5"),
        vllm_page(running="-1", waiting="1", usage="0.5"),
        vllm_page(running="1", waiting="1", usage="7"),
        vllm_page(running="x", waiting="1", usage="0.5"),
        vllm_page(running="1", waiting="1", usage="0.5").replace(b'"0"', b'"9"'),
        vllm_page(running="1", waiting="1", usage="0.5").replace(b'{engine="0"}', b"{engine="),
    ],
)
def test_a_load_with_unusable_values_is_unknown(page: bytes) -> None:
    loads, unusable = read_vllm_loads(page, {0: 10, 1: 10})
    assert loads == {}
    assert unusable >= 1


@given(st.binary())
def test_metrics_may_be_anything(page: bytes) -> None:
    read_vllm_loads(page, {0: 10})
    read_vllm_loads(b"vllm:num_requests_running" + page, {0: 10})
    read_metrics(b"sglang:num_running_reqs" + page, engine())


def test_the_load_of_sglang() -> None:
    entries: list[Any] = [
        {"dp_rank": 0, "num_running_reqs": 2, "num_waiting_reqs": 1, "num_used_tokens": 9},
        {"dp_rank": 7, "num_running_reqs": 2, "num_waiting_reqs": 1, "num_used_tokens": 9},
        {"dp_rank": 0, "num_running_reqs": -2, "num_waiting_reqs": 1, "num_used_tokens": 9},
        "garbage",
    ]
    page = Loads([json.dumps(entry).encode() for entry in entries])  # type: ignore[arg-type]
    loads, unusable = read_loads(page, engine())
    assert (loads[0].running_requests, loads[0].waiting_requests, loads[0].active_blocks) == (2, 1, 3)
    assert unusable == 3
    metrics = b"sglang:num_running_reqs 2\nsglang:num_queue_reqs 1\nsglang:num_used_tokens 9\n"
    assert read_metrics(metrics, engine())[0] == {0: loads[0]}
