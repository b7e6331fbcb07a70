"""Names of the file of models: aliases, fallbacks and canaries, over every API, and while the file changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kvrouter.frontend.request.current_choice import ModelChoice, Reason
from kvrouter.mocker import app as mocker_app
from kvrouter.mocker.settings import MockerSettings
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.telemetry.metrics import new_registry
from kvrouter.v1.common_pb2 import RoutingRequest, TokenIds
from kvrouter.v1.errors import UnknownModel
from kvrouter.v1.frontend_pb2 import FrontendServiceSelectWorkerRequest
from kvrouter.v1.scheduler_pb2 import ExplainRequest
from kvrouter.v1.worker_pb2 import StopConditions

from ....waiting import until
from ..access.keys import Keys
from ..gateway import MODEL, System, request, running_system
from .speaking import speaking_system
from .test_forwarding import Engine, start_engine, too_busy

OTHER = "other-model"
IGNORED = "kvrouter_frontend_ignored_sessions_total"
NAMES = f"""
[models.alias]
serves = "{MODEL}"

[models.safe]
serves = "absent-model"
fallbacks = ["{MODEL}", "{OTHER}"]

[models.{MODEL}]
fallbacks = ["{OTHER}"]

[models.pooled]
serves = "{MODEL}"
pools = ["spot", "workers"]

[models.lost]
serves = "absent-model"

[models.mixed]
serves = "{MODEL}"

[models.mixed.canary]
model = "{OTHER}"
share = 0.5
header = "x-canary"
"""


@pytest.fixture
def names(tmp_path: Path) -> Path:
    path = tmp_path / "models.toml"
    path.write_text(NAMES)
    return path


@pytest.fixture
async def system(nats_url: str, etcd_endpoint: str, namespace: str, names: Path) -> AsyncIterator[System]:
    async with running_system(nats_url, etcd_endpoint, namespace, models_file=str(names)) as running:
        yield running


async def start_other(
    system: System, worker_id: int = 20, model: str = OTHER, component: str = "others", **settings: Any
) -> None:
    """Starts a worker of another model or pool."""
    fields = {"clock_factor": 20.0, "num_blocks": 512, "drain_seconds": 0.2, "mean_output_tokens": 0} | settings
    mocker = MockerSettings(**system.where, worker_id=worker_id, model=model, component=component, **fields)
    worker = await system.stack.enter_async_context(mocker_app.running(mocker, new_registry()))
    await worker.registered()
    await until(lambda: any(worker_id in view.workers for view in system.runtime.directory.components.values()))
    await until(lambda: is_ready(system, model, component))
    async with asyncio.timeout(30):
        while (await complete(system, model))[0] != 200:
            await asyncio.sleep(0.01)


def is_ready(system: System, model: str, pool: str = "") -> bool:
    """Returns whether a model, or one of its pools, has a worker that takes requests."""
    return system.frontend.choices._is_ready(ModelChoice(model, model, Reason.NAME, pool))


async def complete(system: System, model: str, **headers: str) -> tuple[int, dict[str, Any], str]:
    """Returns the status and body of a completion, and how its model was chosen."""
    body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 2}
    url = f"http://{system.http}/v1/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as response:
        return response.status, await response.json(), response.headers.get("x-kvrouter-model-choice", "")


def tries(system: System, name: str, model: str, reason: str, pool: str = "") -> float:
    """Returns how many requests for a name were tried at a model."""
    labels = {"name": name, "model": model, "reason": reason, "pool": pool}
    return system.runtime.registry.get_sample_value("kvrouter_frontend_model_choices_total", labels) or 0.0


async def test_an_alias_stands_for_its_model(system: System) -> None:
    await system.start_worker(1)
    status, body, choice = await complete(system, "alias")
    assert (status, body["model"], choice) == (200, MODEL, "alias for alias")
    assert body["kvrouter"]["model_choice"] == "alias for alias"
    assert tries(system, "alias", MODEL, "alias") == 1
    status, body, choice = await complete(system, MODEL)
    assert (status, body["model"], choice) == (200, MODEL, "")
    assert "model_choice" not in body["kvrouter"]


async def test_explain_shows_how_the_model_was_chosen(system: System) -> None:
    await system.start_worker(1)
    pieces = [each async for each in system.client.generate(request(model="safe"), deadline=Deadline.after(30))]
    (routing,) = [each.routing for each in pieces if each.HasField("routing")]
    assert routing.model_choice == "fallback for safe"
    asked = ExplainRequest(decision_id=routing.decision_id)
    explained = await system.scheduler.explain(asked, deadline=Deadline.after(10))
    assert explained.decision.model_choice == "fallback for safe"


async def test_the_next_model_serves_where_one_has_no_ready_worker(system: System) -> None:
    await start_other(system)
    assert (await complete(system, "safe"))[1]["model"] == OTHER
    await system.start_worker(1)
    assert (await complete(system, "safe"))[1]["model"] == MODEL
    await system.stop_worker(1)
    status, body, choice = await complete(system, MODEL)
    assert (status, body["model"], choice) == (200, OTHER, f"fallback for {MODEL}")


async def test_the_next_pool_serves_where_one_has_no_ready_worker(system: System) -> None:
    await system.start_worker(1)
    status, body, choice = await complete(system, "pooled")
    assert (status, choice) == (200, "fallback for pooled, pool workers")
    await start_other(system, model=MODEL, component="spot")
    for _ in range(4):
        status, body, choice = await complete(system, "pooled")
        assert (body["kvrouter"]["worker_id"], choice) == (20, "alias for pooled, pool spot")
    assert tries(system, "pooled", MODEL, "alias", "spot") == 4
    asked = FrontendServiceSelectWorkerRequest(request=RoutingRequest(model="pooled", token_ids=TokenIds(ids=[1])))
    selection = (await system.client.select_worker(asked, deadline=Deadline.after(10))).selection
    assert selection.component.name == "spot"
    explain = ExplainRequest(decision_id=selection.decision_id)
    explained = await system.scheduler.explain(explain, deadline=Deadline.after(10))
    assert explained.decision.model_choice == "alias for pooled, pool spot"
    async with aiohttp.ClientSession() as http, http.get(f"http://{system.http}/v1/models/pooled") as response:
        assert (await response.json())["pools"] == ["spot", "workers"]


async def test_a_name_without_any_worker_is_refused_as_its_model(system: System) -> None:
    await system.start_worker(1)
    status, body, _ = await complete(system, "lost")
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    with pytest.raises(UnknownModel):
        [each async for each in system.client.generate(request(model="lost"), deadline=Deadline.after(10))]


async def test_the_next_model_serves_where_the_queue_refuses(
    nats_url: str, etcd_endpoint: str, namespace: str, names: Path
) -> None:
    scheduling = {"router_mode": "forecast", "max_queued_requests": 1}
    options: dict[str, Any] = {"models_file": str(names), "scheduling": scheduling}
    async with running_system(nats_url, etcd_endpoint, namespace, **options) as system:
        await start_other(system)
        await system.start_worker(1, num_blocks=32, clock_factor=0.001)

        async def run(number: int) -> None:
            tokens = range(1000 * number, 1000 * number + 300)
            long = request(tokens, model="alias", stop_conditions=StopConditions(max_tokens=100))
            async for _ in system.client.generate(long, deadline=Deadline.after(60)):
                pass

        running = [asyncio.create_task(run(number)) for number in range(2)]
        async with asyncio.timeout(30):
            while not tries(system, MODEL, OTHER, "fallback"):
                tokens = range(90_000, 90_300)
                full = request(tokens, model=MODEL, stop_conditions=StopConditions(max_tokens=1))
                trying = asyncio.create_task(_component(system, full))
                await asyncio.wait([trying], timeout=0.5)
                if not trying.done():
                    running.append(trying)  # It waits in the queue, which is full then.
        assert await _component(system, full) == "others"
        for task in running:
            task.cancel()
        await asyncio.wait(running)


async def _component(system: System, wanted: Any) -> str:
    async for each in system.client.generate(wanted, deadline=Deadline.after(60)):
        if each.HasField("routing"):
            return each.routing.component.name
    return ""


async def test_a_key_limited_to_one_request_falls_back(
    nats_url: str, etcd_endpoint: str, namespace: str, names: Path, tmp_path: Path
) -> None:
    keys = Keys(tmp_path / "keys.json")
    keys.add("single", concurrency=1)
    keys.add("narrow", models=[OTHER])
    keys.write()
    options = {"models_file": str(names), "api_keys": str(keys.path)}
    async with running_system(nats_url, etcd_endpoint, namespace, **options) as system, AsyncExitStack() as stack:
        engine = await start_engine(system, stack, 1)
        engine.respond = too_busy
        single = {"authorization": f"Bearer {keys['single']}"}
        narrow = {"authorization": f"Bearer {keys['narrow']}"}
        mocker = MockerSettings(**system.where, worker_id=20, model=OTHER, component="others", clock_factor=20.0)
        await stack.enter_async_context(mocker_app.running(mocker, new_registry()))
        async with asyncio.timeout(30):
            while (await complete(system, OTHER, **single))[0] != 200:
                await asyncio.sleep(0.01)
        assert (await complete(system, MODEL, **single))[:1] == (200,)
        assert len(engine.bodies) > 0
        # A model that a caller may not use is left out, and not named.
        assert (await complete(system, "safe", **narrow))[1]["model"] == OTHER
        assert await listed(system, narrow) == {OTHER, MODEL, "safe"}
        assert (await complete(system, "alias", **narrow))[0] == 403


async def listed(system: System, headers: dict[str, str]) -> set[str]:
    async with aiohttp.ClientSession() as http, http.get(f"http://{system.http}/v1/models", headers=headers) as got:
        return {each["id"] for each in (await got.json())["data"]}


async def test_an_engine_gets_the_name_of_the_model_and_all_else_unchanged(system: System) -> None:
    async with AsyncExitStack() as stack:
        engine = await start_engine(system, stack, 1)
        sent = {"temperature": 1e2, "messages": [{"role": "user", "content": "\u00e9"}], "model": "alias", "odd": [1.0]}
        url = f"http://{system.http}/v1/chat/completions"
        async with aiohttp.ClientSession() as http, http.post(url, json=sent) as response:
            assert (response.status, response.headers["x-kvrouter-model-choice"]) == (200, "alias for alias")
        (body,) = engine.bodies
        assert list(json.loads(body).items()) == list((sent | {"model": MODEL}).items())


@pytest.mark.parametrize("kind", ["vllm", ""])
async def test_an_engine_gets_the_name_of_the_model_from_agents(system: System, kind: str) -> None:
    said = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    bodies = {"/v1/messages": said, "/v1/responses": {"input": "x"}}
    async with AsyncExitStack() as stack, aiohttp.ClientSession() as http:
        engine = await start_engine(system, stack, 1, engine=kind)
        for path, body in bodies.items():
            async with http.post(f"http://{system.http}{path}", json=body | {"model": "alias"}) as response:
                assert response.headers["x-kvrouter-model-choice"] == "alias for alias"
        assert [json.loads(body)["model"] for body in engine.bodies] == [MODEL, MODEL]


async def test_a_response_over_tokens_names_the_model_that_served(
    nats_url: str, etcd_endpoint: str, namespace: str, names: Path, tmp_path: Path
) -> None:
    said = {"messages": [{"role": "user", "content": "x"}]}
    bodies: dict[str, dict[str, Any]] = {"/v1/messages": said | {"max_tokens": 4}, "/v1/responses": {"input": "x"}}
    async with speaking_system(nats_url, etcd_endpoint, namespace, tmp_path, models_file=str(names)) as (
        system,
        engine,
    ):
        engine.says = "Yes, it is."
        for path, body in bodies.items():
            url = f"http://{system.http}{path}"
            async with aiohttp.ClientSession() as http, http.post(url, json=body | {"model": "alias"}) as response:
                assert (response.status, (await response.json())["model"]) == (200, MODEL)
        counted = said | {"model": "alias"}
        url = f"http://{system.http}/v1/messages/count_tokens"
        async with aiohttp.ClientSession() as http, http.post(url, json=counted) as response:
            assert (await response.json())["input_tokens"] > 0


async def test_another_model_serves_while_an_engine_is_too_busy(system: System) -> None:
    async with AsyncExitStack() as stack:
        engine = Engine()
        await start_other(system)
        engine = await start_engine(system, stack, 1)
        engine.respond = too_busy
        status, body, choice = await complete(system, MODEL, **{"x-session-id": "x" * 300})
        assert (status, body["model"], choice) == (200, OTHER, f"fallback for {MODEL}")
        ignored = system.runtime.registry.get_sample_value(IGNORED, {"source": "header"})
        assert ignored == 1  # It was found once, for both models.
        # Without a fallback the client gets the engine's own error.
        status, body, _ = await complete(system, "alias")
        assert (status, body) == (429, {"error": "full"})


async def test_the_file_is_followed_and_an_unusable_one_changes_nothing(system: System, names: Path) -> None:
    await system.start_worker(1)
    rejected = "kvrouter_frontend_models_file_rejected"
    await asyncio.to_thread(names.write_text, "[models.alias]\nserves = 3\n")
    await until(lambda: system.runtime.registry.get_sample_value(rejected) == 1)
    assert (await complete(system, "alias"))[0] == 200
    await asyncio.to_thread(names.write_text, f'[models.new]\nserves = "{MODEL}"\n')
    await until(lambda: "new" in system.frontend.choices.rules)
    assert system.runtime.registry.get_sample_value(rejected) == 0
    assert (await complete(system, "new"))[0] == 200
    assert (await complete(system, "alias"))[0] == 404


async def test_a_session_stays_on_its_side_and_a_header_chooses_one(system: System) -> None:
    await start_other(system)
    await system.start_worker(1)
    sides = {}
    for number in range(24):
        session = {"x-session-id": f"session-{number}"}
        sides[number] = (await complete(system, "mixed", **session))[1]["model"]
        assert (await complete(system, "mixed", **session))[1]["model"] == sides[number]
    assert set(sides.values()) == {MODEL, OTHER}
    for value, model in {"always": OTHER, "never": MODEL}.items():
        for number in range(4):
            chosen = await complete(system, "mixed", **{"x-canary": value, "x-session-id": f"session-{number}"})
            assert chosen[1]["model"] == model


async def test_a_canary_without_ready_workers_leaves_its_requests_to_the_model(system: System) -> None:
    await system.start_worker(1)
    status, body, choice = await complete(system, "mixed", **{"x-canary": "always"})
    assert (status, body["model"], choice) == (200, MODEL, "fallback for mixed")


async def test_models_lists_names_with_what_serves_them(system: System) -> None:
    await start_other(system)
    await system.start_worker(1)
    async with aiohttp.ClientSession() as http, http.get(f"http://{system.http}/v1/models") as response:
        models = {each["id"]: each for each in (await response.json())["data"]}
    assert set(models) == {MODEL, OTHER, "alias", "pooled", "safe", "mixed"}
    assert models["alias"]["root"] == MODEL
    assert models["alias"]["routes"] == models[MODEL]["routes"]
    assert models["safe"]["fallbacks"] == [MODEL, OTHER]
    assert models["mixed"]["canary"] == {"model": OTHER, "share": 0.5}


async def test_selections_take_names_too(system: System) -> None:
    await system.start_worker(1)
    routing = RoutingRequest(model="safe", token_ids=TokenIds(ids=range(32)))
    asked = FrontendServiceSelectWorkerRequest(request=routing)
    answer = await system.client.select_worker(asked, deadline=Deadline.after(10))
    assert answer.selection.rank.worker_id == 1
    routing = RoutingRequest(model="lost", token_ids=TokenIds(ids=range(32)))
    asked = FrontendServiceSelectWorkerRequest(request=routing)
    with pytest.raises(UnknownModel):
        await system.client.select_worker(asked, deadline=Deadline.after(10))
