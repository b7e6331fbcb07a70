"""What a request must pass before a Scheduler hears of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kvrouter.frontend.access.access import Access
from kvrouter.frontend.access.caller import Caller, RateLimits, acting_for
from kvrouter.frontend.access.quotas import LimitTable, Quotas
from kvrouter.frontend.access.refusals import Refusals
from kvrouter.frontend.access.request_admission import OverloadBounds, OverloadLimits, RequestAdmission
from kvrouter.frontend.generate_request import GenerateRequest, StopRules
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.request.gen_ai import GenAiMetrics
from kvrouter.frontend.request.prefill_stage import Disaggregation
from kvrouter.frontend.request.request_runner import RequestRunner
from kvrouter.frontend.request.served_models import ServedModels
from kvrouter.frontend.settings import FrontendSettings
from kvrouter.frontend.workers.poison_prompts import PoisonPrompts
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.v1.errors import BadRequest, DependencyAway, KvRouterError, Overloaded, PromptTooLong, RateLimited
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, WorkerRegistration
from prometheus_client import CollectorRegistry


class Schedulers:
    """Counts the questions about pools, and has no link to any."""

    def __init__(self) -> None:
        self.asked = 0

    def scheduler(self, component: ComponentName) -> Any:
        self.asked += 1
        raise DependencyAway(f"no Scheduler of {component}")

    def link(self, component: ComponentName, *_: object) -> Any:
        raise DependencyAway(f"no Scheduler of {component}")


def pool(name: str, *, max_model_len: int = 100) -> ComponentView:
    descriptor = ComponentDescriptor(model="m", block_size=16, max_model_len=max_model_len)
    return ComponentView(ComponentName("ns", name), descriptor, {1: WorkerRegistration(worker_id=1)})


async def run(
    schedulers: Any,
    *,
    tokens: int = 10,
    max_tokens: int = 1,
    access: Access | None = None,
    bounds: OverloadBounds | None = None,
    quotas: Quotas | None = None,
) -> None:
    """Runs a request at a Frontend that sees two pools."""
    pools = {view.name: view for view in (pool("short"), pool("long", max_model_len=200))}
    directory: Any = SimpleNamespace(components=pools)
    unused: Any = SimpleNamespace(health=SimpleNamespace(avoided=lambda _: ()))
    texts: Any = SimpleNamespace(vocabulary_size=lambda _: 0)
    registry = CollectorRegistry()
    metrics = FrontendMetrics(registry)
    runner = RequestRunner(
        ServedModels(directory, texts, access),
        schedulers,
        unused,
        metrics,
        FrontendSettings(max_prompt_tokens=1000, max_output_tokens=1000, max_attempts=1, migration_limit=0),
        access=access,
        disaggregation=Disaggregation(directory, schedulers, metrics),
        poison_prompts=PoisonPrompts(0),
        gen_ai=GenAiMetrics(registry),
        admission=RequestAdmission(access, bounds or OverloadBounds(OverloadLimits(0, 0, 0.0), CollectorRegistry())),
    )
    request = GenerateRequest(model="m", stop=StopRules(max_tokens))
    caller = Caller("caller", limits=RateLimits(tokens_per_minute=50.0))
    with acting_for(caller, None if quotas is None else quotas.admit(caller, 0)):
        await runner.run(request, bytes(4 * tokens), unused, deadline=Deadline.after(1))


@pytest.mark.parametrize(
    ("request_fields", "expected"),
    [({"tokens": 0}, BadRequest), ({"tokens": 200}, PromptTooLong), ({"max_tokens": 195}, PromptTooLong)],
)
async def test_no_scheduler_is_asked_about_an_invalid_request(
    request_fields: dict[str, int], expected: type[KvRouterError]
) -> None:
    schedulers = Schedulers()
    with pytest.raises(expected):
        await run(schedulers, **request_fields)
    assert schedulers.asked == 0


async def test_no_scheduler_is_asked_about_a_request_that_has_no_room() -> None:
    schedulers = Schedulers()
    bounds = OverloadBounds(OverloadLimits(1, 0, 0.0), CollectorRegistry())
    bounds.admit([pool("other")], "", 1.0, 1, 1)
    with pytest.raises(Overloaded):
        await run(schedulers, bounds=bounds)
    assert schedulers.asked == 0


async def test_no_scheduler_is_asked_about_a_request_beyond_its_callers_limit() -> None:
    schedulers = Schedulers()
    keys: Any = None
    quotas = Quotas(LimitTable())
    access = Access(keys, None, Refusals(CollectorRegistry()), quotas)
    quotas.admit(Caller("caller", limits=RateLimits(tokens_per_minute=50.0)), 0).add_sequence(45)
    with pytest.raises(RateLimited):
        await run(schedulers, access=access, quotas=quotas)
    assert schedulers.asked == 0


async def test_a_request_that_only_one_pool_takes_goes_there_unasked() -> None:
    schedulers = Schedulers()
    with pytest.raises(DependencyAway, match="no Scheduler of ns/long"):
        await run(schedulers, tokens=150)
    assert schedulers.asked == 0
