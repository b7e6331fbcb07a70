"""What a caller may ask for."""

from __future__ import annotations

from typing import Any

import pytest
from kvrouter.frontend.access.cache_salts import CacheSalts
from kvrouter.frontend.access.caller import Caller, Role
from kvrouter.frontend.access.refusals import RefusalReason, RuleBroken
from kvrouter.frontend.access.rules import FieldRules, check_generation, check_routing, own_booking, visible
from kvrouter.frontend.generate_request import GenerateRequest
from kvrouter.v1.common_pb2 import BlockScope, BookingKey, LocalHashes, RoutingRequest
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest, Model
from kvrouter.v1.worker_pb2 import SamplingOptions

FIELDS, SALTS = FieldRules(), CacheSalts(b"k" * 32)


def generate(**fields: Any) -> GenerateRequest:
    return GenerateRequest.of(FrontendServiceGenerateRequest(**fields))


def why(caller: Caller, request: GenerateRequest) -> RefusalReason | None:
    try:
        check_generation(caller, request, FIELDS, SALTS)
    except RuleBroken as broken:
        return broken.why
    return None


def test_models_and_adapters_must_be_listed() -> None:
    caller = Caller("a", models=("base", "tuned-*"))
    assert why(caller, generate(model="base")) is None
    assert why(caller, generate(model="tuned-1")) is None
    assert why(caller, generate(model="Base")) is RefusalReason.MODEL
    assert why(caller, generate(model="")) is RefusalReason.MODEL
    assert why(caller, generate(model="base", scope=BlockScope(lora_name="tuned-2"))) is None
    assert why(caller, generate(model="base", scope=BlockScope(lora_name="other"))) is RefusalReason.MODEL
    assert why(Caller("all"), generate(model="anything")) is None
    assert why(Caller("none", models=()), generate(model="base")) is RefusalReason.MODEL


def test_a_priority_below_the_smallest_is_refused() -> None:
    caller = Caller("a", min_priority=1)
    assert why(caller, generate(priority=1)) is None
    assert why(caller, generate(priority=0)) is RefusalReason.PRIORITY


def test_an_isolated_caller_gets_its_own_tenant_and_no_other() -> None:
    caller = Caller("a", tenant="t", isolated=True)
    request = generate()
    check_generation(caller, request, FIELDS, SALTS)
    assert request.scope == BlockScope(cache_salt=SALTS.of("t", ""))
    salted = generate(scope=BlockScope(tenant="t", cache_salt="s"))
    check_generation(caller, salted, FIELDS, SALTS)
    assert salted.scope == BlockScope(cache_salt=SALTS.of("t", "s"))
    assert why(caller, generate(scope=BlockScope(tenant="other"))) is RefusalReason.TENANT


def test_a_caller_that_is_not_isolated_may_not_enter_a_tenants_cache() -> None:
    caller = Caller("a", tenant="t")
    request = generate()
    check_generation(caller, request, FIELDS, SALTS)
    assert request.scope is None
    assert why(caller, generate(scope=BlockScope(tenant="t"))) is RefusalReason.TENANT
    assert why(Caller("admin", role=Role.ADMIN), generate(scope=BlockScope(tenant="t"))) is None


def test_hashes_of_a_client_are_refused_where_tenants_are_isolated() -> None:
    request = RoutingRequest(local_hashes=LocalHashes())
    check_routing(Caller("a"), request, "m", SALTS, isolates_tenants=False)
    check_routing(Caller("a", role=Role.ADMIN), request, "m", SALTS, isolates_tenants=True)
    with pytest.raises(RuleBroken, match="token_ids"):
        check_routing(Caller("a"), request, "m", SALTS, isolates_tenants=True)


def test_hashes_with_a_salt_that_is_keyed_are_refused() -> None:
    request = RoutingRequest(local_hashes=LocalHashes(), scope=BlockScope(cache_salt="s"))
    with pytest.raises(RuleBroken, match="token_ids"):
        check_routing(Caller("a", role=Role.ADMIN), request, "m", SALTS, isolates_tenants=False)
    check_routing(Caller("a"), request, "m", None, isolates_tenants=False)
    assert request.scope.cache_salt == "s"


def test_a_salt_of_any_caller_is_keyed() -> None:
    victims = SALTS.of("t", "")
    forged = generate(scope=BlockScope(cache_salt=victims))
    check_generation(Caller("a"), forged, FIELDS, SALTS)
    assert forged.scope == BlockScope(cache_salt=SALTS.of("", victims)) != BlockScope(cache_salt=victims)


def test_options_of_engines_are_checked() -> None:
    def sent(options: str) -> GenerateRequest:
        return generate(sampling_options=SamplingOptions(engine_options_json=options))

    assert why(Caller("a"), sent('{"bad_words": ["x"]}')) is None
    assert why(Caller("a"), sent('{"cache_salt": "tenant:t:"}')) is RefusalReason.FIELD
    assert why(Caller("a", role=Role.ADMIN), sent('{"kv_transfer_params": {}}')) is RefusalReason.FIELD


def test_the_model_of_the_component_counts_not_the_one_that_is_named() -> None:
    with pytest.raises(RuleBroken):
        check_routing(
            Caller("a", models=("mine",)), RoutingRequest(model="mine"), "other", SALTS, isolates_tenants=False
        )


def test_bookings_of_two_tenants_never_have_the_same_id() -> None:
    def booked(tenant: str, request_id: str) -> str:
        key = BookingKey(request_id=request_id)
        own_booking(Caller("a", tenant=tenant), key)
        return key.request_id

    assert len({booked("", "b:x"), booked("b", "x"), booked("", "x"), booked("b", ":x")}) == 4


def test_only_permitted_models_and_adapters_are_visible() -> None:
    models = [Model(name="a", lora_names=["l1", "l2"]), Model(name="b", lora_names=["l3"]), Model(name="c")]
    shown = visible(Caller("x", models=("a", "l2", "l3")), models)
    assert [(model.name, list(model.lora_names)) for model in shown] == [("a", ["l2"]), ("b", ["l3"])]
    assert list(models[0].lora_names) == ["l1", "l2"]
    assert visible(Caller("y"), models) == models
