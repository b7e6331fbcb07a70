"""Which requests are admitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from kvrouter.frontend.access.request_admission import AdmittedRequest, OverloadBounds, OverloadLimits
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.runtime.telemetry.metrics import new_registry
from kvrouter.v1.common_pb2 import Role
from kvrouter.v1.errors import Overloaded
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, RankRegistration, WorkerRegistration


def view(*blocks: int, sequences: Sequence[int] = (), role: Role = Role.ROLE_BOTH) -> ComponentView:
    """A component with a worker of so many blocks of 10 tokens for each number, and the slots of each."""
    workers = {
        number: WorkerRegistration(
            worker_id=number,
            ranks=[RankRegistration(total_blocks=each)],
            max_sequences=sequences[number] if sequences else 0,
        )
        for number, each in enumerate(blocks)
    }
    return ComponentView(ComponentName("n", "c"), ComponentDescriptor(model="m", block_size=10, role=role), workers)


def admitted(
    bounds: OverloadBounds, model: ComponentView, prompt: int, output: int, tenant: str = ""
) -> list[AdmittedRequest]:
    """Admits equal requests until one is refused."""

    def requests() -> Iterator[AdmittedRequest]:
        for _ in range(10_000):
            try:
                yield bounds.admit([model], tenant, 1.0, prompt, output)
            except Overloaded:
                return

    return list(requests())


def test_work_is_bounded_by_the_cache_of_the_models_workers() -> None:
    bounds = OverloadBounds(OverloadLimits(0, 0, 2.0), new_registry())
    assert len(admitted(bounds, view(50, 50), 90, 10)) == 20


def test_the_fill_level_of_admitted_work_is_that_of_the_fullest_model() -> None:
    registry = new_registry()
    bounds = OverloadBounds(OverloadLimits(0, 0, 2.0), registry)
    labels = {"bound": "admitted_work_share", "when_full": "refuses"}
    assert registry.get_sample_value("kvrouter_bound_used", labels) == 0
    running = [bounds.admit([view(50, 50)], "", 1.0, 90, 10) for _ in range(5)]
    assert registry.get_sample_value("kvrouter_bound_used", labels) == 0.25
    assert registry.get_sample_value("kvrouter_bound_limit", labels) == 1
    for each in running:
        each.end(0, sent=True)
    assert registry.get_sample_value("kvrouter_bound_used", labels) == 0


def test_work_is_bounded_by_the_caches_of_all_pools_of_a_model() -> None:
    bounds = OverloadBounds(OverloadLimits(0, 0, 2.0), new_registry())
    pools = [view(50), view(30, 20)]
    running = [bounds.admit(pools, "", 1.0, 90, 10) for _ in range(20)]
    with pytest.raises(Overloaded):
        bounds.admit(pools[::-1], "", 1.0, 90, 10)
    for each in running:
        each.end(0, sent=True)


def test_work_is_bounded_by_the_slots_of_the_models_ranks() -> None:
    bounds = OverloadBounds(OverloadLimits(0, 0, 2.0), new_registry())
    model = view(1000, 1000, sequences=[3, 5])
    running = admitted(bounds, model, 90, 10)
    assert len(running) == 16
    for each in running:
        each.end(0, sent=True)
    assert len(admitted(bounds, model, 90, 10)) == 16


def test_what_a_full_cache_refuses_takes_no_slot() -> None:
    bounds = OverloadBounds(OverloadLimits(0, 0, 1.0), new_registry())
    model = view(100, sequences=[20])
    running = admitted(bounds, model, 90, 10)
    assert len(running) == 10
    for _ in range(100):
        assert not admitted(bounds, model, 90, 10)
    for each in running:
        each.end(0, sent=True)
    assert len(admitted(bounds, model, 30, 10)) == 20


def test_slots_of_prefill_workers_do_not_count() -> None:
    bounds = OverloadBounds(OverloadLimits(0, 0, 1.0), new_registry())
    decode, prefill = view(1000, sequences=[4]), view(1000, sequences=[500], role=Role.ROLE_PREFILL)
    for _ in range(4):
        bounds.admit([prefill, decode], "", 1.0, 10, 10)
    with pytest.raises(Overloaded):
        bounds.admit([prefill, decode], "", 1.0, 10, 10)


def test_nothing_bounds_requests_while_the_slots_of_a_rank_are_unknown() -> None:
    bounds = OverloadBounds(OverloadLimits(0, 0, 1.0), new_registry())
    assert len(admitted(bounds, view(1000, 1000, sequences=[1, 0]), 10, 10)) == 1000


def test_a_tenant_that_takes_all_slots_leaves_others_their_share() -> None:
    bounds = OverloadBounds(OverloadLimits(0, 0, 1.0), new_registry())
    model = view(10_000, sequences=[16])
    assert len(admitted(bounds, model, 10, 10, "quiet")) == 16  # alone it may have all
    bounds = OverloadBounds(OverloadLimits(0, 0, 1.0), new_registry())
    bounds.admit([model], "quiet", 1.0, 10, 10)
    assert len(admitted(bounds, model, 10, 10, "flood")) == 11
    assert len(admitted(bounds, model, 10, 10, "quiet")) == 4


def test_work_counts_what_requests_generate_not_what_they_may() -> None:
    bounds = OverloadBounds(OverloadLimits(0, 0, 1.0), new_registry())
    model = view(1000)
    for _ in range(200):
        bounds.admit([model], "", 1.0, 90, 100_000).end(10, sent=True)
    assert 99 <= len(admitted(bounds, model, 90, 100_000)) <= 101


def test_nothing_bounds_work_while_a_cache_is_of_unknown_size() -> None:
    bounds = OverloadBounds(OverloadLimits(0, 0, 1.0), new_registry())
    assert len(admitted(bounds, view(1, 0), 1000, 1)) == 10_000


def test_requests_and_prompts_are_bounded_and_refusals_counted() -> None:
    registry = new_registry()
    bounds = OverloadBounds(OverloadLimits(10, 400, 0.0), registry)
    model = view(1)
    small = admitted(bounds, model, 1, 1)
    assert len(small) == 10
    for each in small:
        each.end(0, sent=True)
    assert len(admitted(bounds, model, 25, 1)) == 4
    for bound in ("requests", "prompt_bytes"):
        assert registry.get_sample_value("kvrouter_frontend_overload_refusals_total", {"bound": bound}) == 1


def test_a_refused_request_leaves_nothing_behind() -> None:
    bounds = OverloadBounds(OverloadLimits(100, 0, 1.0), new_registry())
    model = view(10)
    running = admitted(bounds, model, 100, 1)
    for _ in range(200):
        with pytest.raises(Overloaded, match="more work") as refused:
            bounds.admit([model], "", 1.0, 100, 1)
        assert refused.value.info.retry_after_ms
    for each in running:
        each.end(1, sent=True)
    assert len(admitted(bounds, view(10_000), 1, 1)) == 100
