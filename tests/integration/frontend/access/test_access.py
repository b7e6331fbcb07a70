"""Who may call what: every API with no credential, with wrong ones, and with those of other tenants and roles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc.aio
import pytest
from kvrouter.frontend.access.refusals import RefusalReason
from kvrouter.net.calls import CallStreamClient, NotSent
from kvrouter.scheduler.api.selection import Selector
from kvrouter.v1 import frontend_pb2_grpc
from kvrouter.v1.common_pb2 import BlockScope, BookingKey, LocalHashes, RoutingRequest, Stage, TokenIds
from kvrouter.v1.error_encoding import from_rpc_error
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.errors_pb2 import ErrorReason
from kvrouter.v1.frontend_pb2 import (
    FrontendServiceFindMatchesRequest,
    FrontendServiceFreeRequest,
    FrontendServiceGetPotentialLoadsRequest,
    FrontendServiceMarkPrefillCompleteRequest,
    FrontendServiceSelectWorkerRequest,
    GetWorkerHealthRequest,
    ListModelsRequest,
)
from kvrouter.v1.scheduler_pb2 import SelectWorkerRequest, SelectWorkerResponse

from ..gateway import MODEL, System, request
from .keys import Keys

ROUTING = RoutingRequest(model=MODEL, token_ids=TokenIds(ids=range(40)))
BODY = {"model": MODEL, "prompt": list(range(40)), "max_tokens": 3}


@dataclass(frozen=True)
class Grpc:
    """The gRPC API of a Frontend."""

    stub: Any

    async def code(self, method: str, message: Any, *metadata: tuple[str, str]) -> str:
        """Calls a method and returns the name of its status code."""
        try:
            answer = getattr(self.stub, method)(message, metadata=metadata)
            if method == "Generate":
                async for _ in answer:
                    pass
            else:
                await answer
        except grpc.aio.AioRpcError as failed:
            return failed.code().name
        return "OK"

    async def error(self, method: str, message: Any, *metadata: tuple[str, str]) -> KvRouterError:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await getattr(self.stub, method)(message, metadata=metadata)
        return from_rpc_error(failed.value)


@pytest.fixture
async def grpc_api(guarded: System) -> AsyncIterator[Grpc]:
    async with grpc.aio.insecure_channel(guarded.target) as channel:
        yield Grpc(frontend_pb2_grpc.FrontendServiceStub(channel))  # type: ignore[no-untyped-call]


@pytest.fixture
async def http(guarded: System) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(f"http://{guarded.http}") as session:
        yield session


def bearer(key: str) -> tuple[str, str]:
    return "authorization", f"Bearer {key}"


CLIENT_CALLS = {
    "Generate": request(),
    "SelectWorker": FrontendServiceSelectWorkerRequest(request=ROUTING),
    "GetPotentialLoads": FrontendServiceGetPotentialLoadsRequest(request=ROUTING),
    "FindMatches": FrontendServiceFindMatchesRequest(request=ROUTING),
    "MarkPrefillComplete": FrontendServiceMarkPrefillCompleteRequest(
        booking=BookingKey(request_id="b", stage=Stage.STAGE_WHOLE)
    ),
    "Free": FrontendServiceFreeRequest(booking=BookingKey(request_id="b", stage=Stage.STAGE_WHOLE)),
    "ListModels": ListModelsRequest(),
}
MODEL_CALLS = ("Generate", "SelectWorker", "GetPotentialLoads", "FindMatches")
HTTP_CALLS = [
    ("POST", "/v1/completions", BODY),
    ("POST", "/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}),
    ("GET", "/v1/models", None),
    ("GET", f"/v1/models/{MODEL}", None),
    ("GET", "/busy_threshold", None),
    ("POST", "/busy_threshold", {"model": MODEL}),
    ("GET", "/metrics", None),
    ("GET", "/nothing/here", None),
]


async def test_invalid_credentials_are_refused_over_every_api(
    guarded: System, grpc_api: Grpc, http: aiohttp.ClientSession, keys: Keys, capfd: pytest.CaptureFixture[str]
) -> None:
    headers: dict[RefusalReason, list[tuple[str, str]]] = {
        RefusalReason.NO_CREDENTIAL: [],
        RefusalReason.MALFORMED: [("authorization", "Basic eDp5")],
        RefusalReason.INVALID_KEY: [bearer(keys["client"][:-1])],
        RefusalReason.REVOKED: [bearer(keys["revoked"])],
        RefusalReason.EXPIRED: [("x-api-key", keys["expired"])],
    }
    for why, sent in headers.items():
        before = refused(guarded, why)
        for method, message in [*CLIENT_CALLS.items(), ("GetWorkerHealth", GetWorkerHealthRequest())]:
            assert await grpc_api.code(method, message, *sent) == "UNAUTHENTICATED", (why, method)
        for verb, path, body in HTTP_CALLS:
            async with http.request(verb, path, json=body, headers=sent) as response:
                assert response.status == 401, (why, path)
                assert response.headers["WWW-Authenticate"] == "Bearer"
                error = (await response.json())["error"]
                assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert refused(guarded, why) - before == len(CLIENT_CALLS) + 1 + len(HTTP_CALLS)
    written = capfd.readouterr()
    assert "access.refused" in written.out + written.err
    assert not any(secret in written.out + written.err for secret in keys.secrets)


async def test_a_valid_key_is_accepted_over_every_api(grpc_api: Grpc, http: aiohttp.ClientSession, keys: Keys) -> None:
    for sent in (bearer(keys["client"]), ("x-api-key", keys["client"])):
        for method, message in CLIENT_CALLS.items():
            # The system of these tests has no Indexer.
            expected = "UNAVAILABLE" if method == "FindMatches" else "OK"
            assert await grpc_api.code(method, message, sent) == expected, method
        async with http.post("/v1/completions", json=BODY, headers=[sent]) as response:
            assert response.status == 200
        async with http.get(f"/v1/models/{MODEL}", headers=[sent]) as response:
            assert response.status == 200


async def test_a_health_probe_needs_no_key_and_learns_no_names(http: aiohttp.ClientSession) -> None:
    async with http.get("/health") as response:
        assert (response.status, await response.json()) == (200, {"status": "ready"})


async def test_a_model_that_is_not_permitted_is_refused_whether_it_exists_or_not(
    guarded: System, grpc_api: Grpc, http: aiohttp.ClientSession, keys: Keys
) -> None:
    sent = bearer(keys["other"])
    before = refused(guarded, RefusalReason.MODEL)
    for method in MODEL_CALLS:
        assert await grpc_api.code(method, CLIENT_CALLS[method], sent) == "PERMISSION_DENIED"
    async with http.post("/v1/completions", json=BODY, headers=[sent]) as response:
        assert response.status == 403
        known = (await response.json())["error"]
        assert known["type"] == "permission_error"
    async with http.post("/v1/completions", json=BODY | {"model": "nowhere-here"}, headers=[sent]) as response:
        unknown = (await response.json())["error"]
    assert unknown == known | {"message": known["message"].replace(MODEL, "nowhere-here")}
    assert refused(guarded, RefusalReason.MODEL) - before == len(MODEL_CALLS) + 2


async def test_a_component_does_not_lead_around_the_permitted_models(
    guarded: System, grpc_api: Grpc, keys: Keys
) -> None:
    component = next(iter(guarded.runtime.directory.components.values())).descriptor.component
    hidden = RoutingRequest(model="another-model", component=component, token_ids=TokenIds(ids=range(40)))
    for method, message in (
        ("SelectWorker", FrontendServiceSelectWorkerRequest(request=hidden)),
        ("GetPotentialLoads", FrontendServiceGetPotentialLoadsRequest(request=hidden)),
    ):
        assert await grpc_api.code(method, message, bearer(keys["other"])) == "PERMISSION_DENIED"


async def test_only_permitted_models_are_listed(http: aiohttp.ClientSession, keys: Keys) -> None:
    for key, names in (("client", [MODEL]), ("other", []), ("admin", [MODEL])):
        async with http.get("/v1/models", headers=[bearer(keys[key])]) as response:
            assert [model["id"] for model in (await response.json())["data"]] == names
    async with http.get(f"/v1/models/{MODEL}", headers=[bearer(keys["other"])]) as response:
        assert response.status == 404
        assert MODEL not in (await response.json())["error"]["message"].removeprefix(
            f"The model '{MODEL}' does not exist"
        )


async def test_administrative_calls_need_the_role(
    guarded: System, grpc_api: Grpc, http: aiohttp.ClientSession, keys: Keys
) -> None:
    before = refused(guarded, RefusalReason.ROLE)
    for verb, path, body in HTTP_CALLS:
        if path.startswith("/v1/"):
            continue
        async with http.request(verb, path, json=body, headers=[bearer(keys["client"])]) as response:
            assert response.status == 403, path
        async with http.request(verb, path, json=body, headers=[bearer(keys["admin"])]) as response:
            assert response.status == (404 if "nothing" in path else 200), path
    health = GetWorkerHealthRequest()
    assert await grpc_api.code("GetWorkerHealth", health, bearer(keys["client"])) == "PERMISSION_DENIED"
    assert await grpc_api.code("GetWorkerHealth", health, bearer(keys["admin"])) == "OK"
    assert refused(guarded, RefusalReason.ROLE) - before == 5


async def test_a_call_stream_opens_for_a_valid_credential_only(guarded: System, keys: Keys) -> None:
    async def listed(*metadata: tuple[str, str]) -> str:
        client = CallStreamClient(guarded.target, client_name="test", metadata=lambda: metadata)
        running = asyncio.create_task(client.run())
        try:
            method = "kvrouter.v1.FrontendService/ListModels"
            await client.call(method, ListModelsRequest().SerializeToString(), time_left=30)
        except NotSent as error:
            return str(error)
        finally:
            running.cancel()
            await asyncio.wait([running])
        return "OK"

    assert "UNAUTHENTICATED" in await listed()
    assert "UNAUTHENTICATED" in await listed(bearer(keys["revoked"]))
    assert await listed(bearer(keys["client"])) == "OK"


async def test_tenants_share_no_blocks(guarded: System, http: aiohttp.ClientSession, keys: Keys) -> None:
    keys.add("second", tenant="v")
    keys.tenants = [*keys.tenants, type(keys.tenants[0])(name="v", isolated=True)]
    keys.write()
    await _until_valid(http, keys["second"])

    async def cached(key: str) -> int:
        body = BODY | {"prompt": list(range(64))}
        async with http.post("/v1/completions", json=body, headers=[bearer(keys[key])]) as response:
            details = (await response.json())["usage"]["prompt_tokens_details"]
            return int(details["cached_tokens"])

    assert await cached("client") == 0
    assert await cached("second") == 0
    assert await cached("admin") == 0
    assert await cached("client") > 0


async def test_the_scheduler_learns_the_tenant_of_each_request(
    guarded: System, grpc_api: Grpc, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants: list[str] = []
    select = Selector.select

    async def noted(self: Selector, chosen: SelectWorkerRequest, **named: Any) -> SelectWorkerResponse:
        tenants.append(chosen.tenant)
        return await select(self, chosen, **named)

    monkeypatch.setattr(Selector, "select", noted)
    for key in ("client", "admin"):
        assert await grpc_api.code("Generate", request(), bearer(keys[key])) == "OK"
    assert tenants == ["t", ""]


async def test_a_tenant_cannot_look_into_anothers_cache(grpc_api: Grpc, keys: Keys) -> None:
    sent = bearer(keys["client"])
    named = request(scope=BlockScope(tenant="u"))
    assert await grpc_api.code("Generate", named, sent) == "PERMISSION_DENIED"
    hashed = RoutingRequest(model=MODEL, local_hashes=LocalHashes(), prompt_tokens=40, block_size=16)
    error = await grpc_api.error("SelectWorker", FrontendServiceSelectWorkerRequest(request=hashed), sent)
    assert (error.code.name, error.info.field) == ("PERMISSION_DENIED", "local_hashes")


async def test_a_tenant_cannot_release_anothers_booking(grpc_api: Grpc, keys: Keys) -> None:
    keys_of = {key: (bearer(keys[key]),) for key in ("client", "admin", "other")}
    booking = BookingKey(request_id="mine", stage=Stage.STAGE_WHOLE)
    await grpc_api.stub.SelectWorker(
        FrontendServiceSelectWorkerRequest(request=ROUTING, booking=booking), metadata=keys_of["client"]
    )
    released = FrontendServiceFreeRequest(booking=booking)
    assert not (await grpc_api.stub.Free(released, metadata=keys_of["other"])).known
    assert (await grpc_api.stub.Free(released, metadata=keys_of["client"])).known


async def test_a_changed_file_is_in_force_without_a_restart(
    guarded: System, http: aiohttp.ClientSession, keys: Keys
) -> None:
    keys.add("new")
    keys.write()
    await _until_valid(http, keys["new"])
    keys.change("new", revoked=1)
    keys.write()
    await _until_valid(http, keys["new"], status=401)
    async with http.get("/v1/models", headers=[bearer(keys["client"])]) as response:
        assert response.status == 200


async def test_an_unusable_file_leaves_the_former_keys_in_force(
    guarded: System, http: aiohttp.ClientSession, keys: Keys
) -> None:
    keys.path.chmod(0o644)
    async with asyncio.timeout(30):
        while guarded.runtime.registry.get_sample_value("kvrouter_frontend_api_keys_rejected") != 1:
            await asyncio.sleep(0.02)
    async with http.get("/v1/models", headers=[bearer(keys["client"])]) as response:
        assert response.status == 200
    keys.path.chmod(0o600)
    async with asyncio.timeout(30):
        while guarded.runtime.registry.get_sample_value("kvrouter_frontend_api_keys_rejected") != 0:
            await asyncio.sleep(0.02)


async def test_limits_are_refused_with_the_time_to_wait_over_every_api(
    guarded: System, grpc_api: Grpc, http: aiohttp.ClientSession, keys: Keys
) -> None:
    for name, limits in (("r", {"requests_per_second": 0.001}), ("t", {"tokens_per_minute": 1})):
        keys.add(f"{name}-http", **limits)
        keys.add(f"{name}-grpc", **limits)
    keys.write()
    await _until_valid(http, keys["t-grpc"])
    for name, why in (("r", RefusalReason.REQUEST_RATE), ("t", RefusalReason.TOKEN_RATE)):
        before = refused(guarded, why)
        sent = bearer(keys[f"{name}-http"])
        async with http.post("/v1/completions", json=BODY, headers=[sent]) as response:
            assert response.status == 200
        async with http.post("/v1/completions", json=BODY, headers=[sent]) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) > 60
            assert (await response.json())["error"]["type"] == "rate_limit_error"
        sent = bearer(keys[f"{name}-grpc"])
        assert await grpc_api.code("Generate", request(), sent) == "OK"
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            async for _ in grpc_api.stub.Generate(request(), metadata=[sent]):
                pass
        info = from_rpc_error(failed.value).info
        assert info.reason == ErrorReason.ERROR_REASON_RATE_LIMITED
        assert info.retry_after_ms > 60_000
        assert refused(guarded, why) - before == 2
    assert (
        await grpc_api.code("SelectWorker", CLIENT_CALLS["SelectWorker"], bearer(keys["r-grpc"]))
        == "RESOURCE_EXHAUSTED"
    )


async def _until_valid(http: aiohttp.ClientSession, key: str, *, status: int = 200) -> None:
    async with asyncio.timeout(30):
        while True:
            async with http.get("/v1/models", headers=[bearer(key)]) as response:
                if response.status == status:
                    return
            await asyncio.sleep(0.02)


def refused(system: System, why: RefusalReason) -> float:
    sample = system.runtime.registry.get_sample_value
    return sample("kvrouter_frontend_access_refusals_total", {"reason": why.value}) or 0.0
