"""What the gateway refuses before it does anything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kvrouter.frontend.generate_request import GenerateRequest
from kvrouter.frontend.request.model_pools import context_length, describe_models, pools_of_model
from kvrouter.frontend.request.request_checks import Limits, check_request, prompt_limit
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.v1.common_pb2 import Component, Role, RoutingOverrides, Stage
from kvrouter.v1.errors import BadRequest, KvRouterError, PromptTooLong, UnknownModel
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, WorkerRegistration
from kvrouter.v1.worker_pb2 import SamplingOptions, StopConditions

LIMITS = Limits(max_prompt_tokens=100, max_output_tokens=1000)


def view(name: str, model: str, *, workers: int = 1, role: Role = Role.ROLE_BOTH, longest: int = 0) -> ComponentView:
    component = ComponentName("ns", name)
    descriptor = ComponentDescriptor(
        component=Component(namespace="ns", name=name),
        model=model,
        block_size=16,
        role=role,
        max_model_len=longest,
    )
    return ComponentView(component, descriptor, {i: WorkerRegistration(worker_id=i) for i in range(workers)})


def by_name(*views: ComponentView) -> dict[ComponentName, ComponentView]:
    return {each.name: each for each in views}


def request(**fields: Any) -> GenerateRequest:
    defaults: dict[str, Any] = {
        "model": "m",
        "stop_conditions": StopConditions(max_tokens=10),
    }
    return GenerateRequest.of(FrontendServiceGenerateRequest(**(defaults | fields)))


def test_tokens_for_a_server_that_has_only_an_openai_api_are_refused() -> None:
    url = "http://h:1"
    servers = replace(view("a", "m"), workers={0: WorkerRegistration(worker_id=0, endpoint=url, openai_endpoint=url)})
    with pytest.raises(BadRequest) as caught:
        check_request(request(), 3, servers, LIMITS)
    assert caught.value.info.field == "model"


def test_the_error_for_an_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(UnknownModel) as caught:
        pools_of_model("x", by_name(view("a", "m"), view("b", "n"), view("c", "dead", workers=0)))
    assert list(caught.value.info.known_values) == ["m", "n"]


def test_prefill_workers_alone_do_not_serve_a_model() -> None:
    with pytest.raises(UnknownModel, match="only prefill workers serve the model 'm'"):
        pools_of_model("m", by_name(view("a", "m", role=Role.ROLE_PREFILL)))
    with pytest.raises(UnknownModel, match="The model 'm' does not exist"):
        pools_of_model("m", by_name(view("a", "m", workers=0, role=Role.ROLE_PREFILL)))


def test_decode_workers_alone_do_not_serve_the_prefill_stage() -> None:
    with pytest.raises(UnknownModel, match="only decode workers serve the model 'm'"):
        pools_of_model("m", by_name(view("a", "m", role=Role.ROLE_DECODE)), Stage.STAGE_PREFILL)


def test_of_two_components_the_larger_serves() -> None:
    assert pools_of_model("m", by_name(view("a", "m"), view("b", "m", workers=2)))[0].name.name == "b"


def test_models_are_described_in_order() -> None:
    described = describe_models(by_name(view("b", "n", workers=3), view("a", "m"), view("c", "dead", workers=0)))
    assert [(model.name, model.workers) for model in described] == [("m", 1), ("n", 3)]


def test_a_good_request_passes() -> None:
    check_request(request(), 3, view("a", "m", longest=13), LIMITS)


@pytest.mark.parametrize(
    ("fields", "tokens", "field"),
    [
        ({}, 0, "token_ids"),
        ({}, 101, "token_ids"),
        ({"request_id": "é" * 57}, 3, "request_id"),
        ({"stop_conditions": StopConditions(max_tokens=0)}, 3, "stop_conditions.max_tokens"),
        ({"stop_conditions": StopConditions(max_tokens=1001)}, 3, "stop_conditions.max_tokens"),
        ({"stop_conditions": StopConditions(max_tokens=1, min_tokens=2)}, 3, "stop_conditions.min_tokens"),
        ({"stop_conditions": StopConditions(max_tokens=1, stop=["\n"])}, 3, "stop_conditions.stop"),
        ({"sampling_options": SamplingOptions(temperature=-1)}, 3, "sampling_options.temperature"),
        ({"sampling_options": SamplingOptions(top_p=0)}, 3, "sampling_options.top_p"),
        ({"sampling_options": SamplingOptions(min_p=2)}, 3, "sampling_options.min_p"),
        ({"sampling_options": SamplingOptions(n=2)}, 3, "sampling_options.n"),
        ({"sampling_options": SamplingOptions(n=0)}, 3, "sampling_options.n"),
        ({"overrides": RoutingOverrides(router_temperature=-0.1)}, 3, "overrides.router_temperature"),
        ({"overrides": RoutingOverrides(router_temperature=float("nan"))}, 3, "overrides.router_temperature"),
        ({"overrides": RoutingOverrides(overlap_score_weight=-1)}, 3, "overrides.overlap_score_weight"),
        (
            {"overrides": RoutingOverrides(active_decode_blocks_threshold=1.5)},
            3,
            "overrides.active_decode_blocks_threshold",
        ),
    ],
)
def test_an_error_names_the_fault_and_gives_advice(fields: dict[str, Any], tokens: int, field: str) -> None:
    with pytest.raises(KvRouterError) as caught:
        check_request(request(**fields), tokens, view("a", "m"), LIMITS)
    assert caught.value.info.field == field
    assert caught.value.info.advice


def test_the_models_length_bounds_prompt_and_output() -> None:
    with pytest.raises(PromptTooLong, match=r"maximum context length is 13 tokens.+ you requested 14") as caught:
        check_request(request(), 13, view("a", "m", longest=13), LIMITS)
    assert (caught.value.info.advice, caught.value.info.known_values) == ("Send at most 12 tokens.", ["12"])
    with pytest.raises(PromptTooLong, match=r"maximum context length is 12 tokens.+ you requested 13") as caught:
        check_request(request(), 3, view("a", "m", longest=12), LIMITS)
    assert "at most 9" in caught.value.info.advice
    assert caught.value.info.field == "stop_conditions.max_tokens"


def test_the_prefill_stage_of_a_model_has_a_component_of_its_own() -> None:
    components = by_name(view("decode", "m", role=Role.ROLE_DECODE), view("prefill", "m", role=Role.ROLE_PREFILL))
    assert pools_of_model("m", components, Stage.STAGE_PREFILL)[0].name.name == "prefill"
    assert pools_of_model("m", components, Stage.STAGE_DECODE)[0].name.name == "decode"


def test_a_text_may_be_as_long_as_the_longest_context_of_a_pool_with_workers() -> None:
    large, long = view("large", "m", workers=3, longest=20), view("long", "m", longest=50)
    without_workers = view("gone", "m", workers=0, longest=90)
    for views, expected in (
        ([large, long, without_workers], 49),
        ([without_workers], 89),
        ([large, view("any", "m")], LIMITS.max_prompt_tokens),
    ):
        with prompt_limit(views, LIMITS) as limit:
            assert limit == expected


def test_the_context_length_is_that_of_the_first_pool_that_the_prompt_fits() -> None:
    pools = [view("large", "m", workers=3, longest=20), view("long", "m", longest=50)]
    assert [context_length(tokens, pools) for tokens in (19, 20, 49)] == [20, 50, 50]
    assert context_length(20, [pools[0], view("any", "m")]) == 0
