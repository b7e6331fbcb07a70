"""The index over HTTP, as other routers ask for it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kvrouter.devtools.system.certificates import PEER_DOMAIN, DevelopmentAuthority
from kvrouter.indexer.api.query_server import serving_queries
from kvrouter.indexer.app import running
from kvrouter.indexer.settings import IndexerSettings
from kvrouter.net.nats.event_stream import ensure_stream
from kvrouter.runtime.process.context import open_runtime
from kvrouter.v1.common_pb2 import Tier
from kvrouter.v1.events_pb2 import BlocksStored, KvEvent
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, RankRegistration, WorkerRegistration

from ...registered import Registered
from ..event_batches import BLOCK_SIZE, RankSource, hashes, tokens
from ..indexing import PATIENCE_SECONDS, connected
from ..serving import settings_for

pytestmark = pytest.mark.timeout(60)

TOKEN = "t" * 43
PROMPT = tokens(3)


class Queries:
    """A server of queries, and a client."""

    def __init__(self, url: str, session: aiohttp.ClientSession, context: ssl.SSLContext | bool) -> None:
        self.url = url
        self._session = session
        self._context = context

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, Any]:
        content = {"data": body} if isinstance(body, bytes) else {"json": body}
        request = self._session.post(f"{self.url}{path}", headers=headers, ssl=self._context, **content)
        async with request as response:
            return response.status, await response.json()

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self._session.get(f"{self.url}{path}", headers=headers, ssl=self._context) as response:
            return response.status, await response.json()

    async def until(self, path: str, body: object, status: int = 200) -> Any:
        """Returns the answer with this status, once it has one."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (answer := await self.post(path, body))[0] != status:
                await asyncio.sleep(0.02)
        return answer[1]


@asynccontextmanager
async def serving(settings: IndexerSettings, context: ssl.SSLContext | bool = True) -> AsyncIterator[Queries]:
    async with (
        open_runtime(settings) as runtime,
        running(settings, runtime) as indexer,
        serving_queries(indexer, runtime, "127.0.0.1:0", max_prompt_tokens=settings.max_prompt_tokens) as address,
        aiohttp.ClientSession() as session,
    ):
        scheme = "http" if runtime.tls is None else "https"
        yield Queries(f"{scheme}://{address}", session, context)


@pytest.fixture
async def system(etcd_endpoint: str, nats_url: str, component: ComponentName) -> AsyncIterator[Registered]:
    """Two workers with the prompt of Dynamo's own tests: three blocks, of which one is in host memory only."""
    registered = Registered(component=component, etcd=etcd_endpoint)
    descriptor = ComponentDescriptor(
        component=registered.named, model="test-model", block_size=BLOCK_SIZE, hash_scheme="xxh3-1337"
    )
    await registered.put(component.descriptor_key, descriptor)
    async with connected(nats_url) as nats:
        await ensure_stream(nats.jetstream(), component)
        for worker_id in (7, 8):
            registration = WorkerRegistration(
                worker_id=worker_id,
                component=registered.named,
                model="test-model",
                endpoint="127.0.0.1:1",
                openai_endpoint=f"http://engine-{worker_id}:8000",
                block_size=BLOCK_SIZE,
                hash_scheme="xxh3-1337",
                publishes_events=True,
                ranks=[RankRegistration(dp_rank=0, incarnation=1)],
            )
            await registered.put(component.worker_key(worker_id), registration)
            source = RankSource(component, worker_id).stored(PROMPT[: 2 * BLOCK_SIZE], 100)
            await source.publish(nats.jetstream())
            if worker_id == 7:
                local = hashes(PROMPT)[2]
                stored = BlocksStored(parent_engine_hash=101, engine_hashes=[102], local_hashes=[local])
                event = KvEvent(event_id=source.next_event_id, tier=Tier.TIER_HOST, stored=stored)
                source.next_event_id += 1
                source.events.append(event)
                await source.publish(nats.jetstream())
        yield registered


EXPECTED = {
    "scores": {"7": {"0": 8}, "8": {"0": 8}},
    "frequencies": [],
    "instances": {
        "7": {"longest_matched": 12, "gpu": 8, "dp": {"0": 8}, "cpu": 12, "disk": 12},
        "8": {"longest_matched": 8, "gpu": 8, "dp": {"0": 8}, "cpu": 8, "disk": 8},
    },
}


async def test_both_protocols_see_the_tiers_of_each_worker(
    system: Registered, etcd_endpoint: str, nats_url: str, component: ComponentName
) -> None:
    async with serving(settings_for(etcd_endpoint, nats_url, component)) as queries:
        dynamo = {"token_ids": PROMPT, "model_name": "test-model"}
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await queries.until("/query", dynamo) != EXPECTED:
                await asyncio.sleep(0.02)
        by_hash = {"block_hashes": hashes(PROMPT), "model_name": "test-model"}
        assert await queries.post("/query_by_hash", by_hash) == (200, EXPECTED)
        conductor = {"model": "test-model", "block_size": BLOCK_SIZE, "token_ids": PROMPT}
        status, answer = await queries.post("/query", conductor)
        assert status == 200
        assert answer["default"]["7"] == {"longest_matched": 12, "GPU": 8, "DP": {"0": 12}, "CPU": 12, "DISK": 12}
        status, answer = await queries.post("/query", conductor | {"tenant_id": component.name, "instance_id": "8"})
        assert list(answer) == [component.name]
        assert list(answer[component.name]) == ["8"]

        status, workers = await queries.get("/workers?model_name=test-model")
        assert [(each["instance_id"], each["endpoints"]) for each in workers] == [
            (7, {"0": "http://engine-7:8000"}),
            (8, {"0": "http://engine-8:8000"}),
        ]
        assert await queries.get("/workers?model_name=other") == (200, [])


async def test_what_cannot_be_answered_says_why(
    system: Registered, etcd_endpoint: str, nats_url: str, component: ComponentName
) -> None:
    async with serving(settings_for(etcd_endpoint, nats_url, component)) as queries:
        assert (await queries.get("/health"))[0] in (200, 503)
        query = {"token_ids": PROMPT, "model_name": "test-model"}
        await queries.until("/query", query)
        for changed, status, words in (
            ({"model_name": "other"}, 404, "test-model"),
            ({"routing_group": "other"}, 404, "test-model"),
            ({"model_name": "", "model": "test-model", "block_size": 16}, 400, "block size"),
            ({"token_ids": [0] * 1001}, 400, "1000"),
        ):
            found, answer = await queries.post("/query", query | changed)
            assert (found, words in answer["error"]) == (status, True), answer
        found, answer = await queries.post("/query_by_hash", {"model_name": "test-model", "block_hashes": [1] * 251})
        assert found == 400
        assert "1000" in answer["error"]
        assert (await queries.post("/query", b"{"))[0] == 400
        assert (await queries.post("/query", b" " * (21 * 1000 + (64 << 10) + 1)))[0] == 413
        assert (await queries.post("/register", {}))[0] == 404
        assert (await queries.get("/query"))[0] == 405


async def test_a_router_shows_the_service_token(
    system: Registered, etcd_endpoint: str, nats_url: str, component: ComponentName, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(TOKEN)
    settings = settings_for(etcd_endpoint, nats_url, component).model_copy(update={"service_token_file": str(token)})
    async with serving(settings) as queries:
        query = {"token_ids": PROMPT, "model_name": "unknown"}
        for headers in ({}, {"authorization": f"Bearer {'x' * 43}"}, {"x-kvrouter-service-token": "x" * 43}):
            status, answer = await queries.post("/query", query, **headers)
            assert (status, "--service-token-file" in answer["error"]) == (403, True)
            assert (await queries.get("/workers", **headers))[0] == 403
        for headers in ({"authorization": f"Bearer {TOKEN}"}, {"x-kvrouter-service-token": TOKEN}):
            assert (await queries.post("/query", query, **headers))[0] in (404, 503)
            assert (await queries.get("/workers", **headers))[0] == 200
        assert (await queries.get("/health"))[0] in (200, 503)


async def test_a_router_shows_a_certificate_that_may_ask(
    system: Registered, etcd_endpoint: str, nats_url: str, component: ComponentName, tmp_path: Path
) -> None:
    authority = DevelopmentAuthority(tmp_path / "tls")
    own = authority.issue("indexer")
    tls = {"tls_cert_file": str(own.cert), "tls_key_file": str(own.key), "tls_ca_file": str(own.authority)}
    # etcd and NATS of the tests have no certificates, so the Indexer knows no component.
    settings = settings_for("127.0.0.1:1", "nats://127.0.0.1:1", component).model_copy(
        update=tls | {"tls_client_auth": "required", "tls_peer_domain": PEER_DOMAIN}
    )
    async with AsyncExitStack() as stack:
        for role, expected in (("scheduler", 404), ("frontend", 404), ("worker", 403)):
            client = authority.issue(role)
            context = ssl.create_default_context(cafile=str(client.authority))
            context.load_cert_chain(client.cert, client.key)
            queries = await stack.enter_async_context(serving(settings, context))
            assert (await queries.post("/query", {"token_ids": PROMPT, "model_name": "m"}))[0] == expected
