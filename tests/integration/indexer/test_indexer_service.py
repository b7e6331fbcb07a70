"""The IndexerService as an object and behind gRPC: both answer alike."""

from __future__ import annotations

import asyncio
import signal
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar, cast

import aiohttp
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvrouter.core import Scope, local_hashes
from kvrouter.indexer.app import running
from kvrouter.indexer.settings import IndexerSettings
from kvrouter.publisher.etcd import Put, connect, watch_prefix
from kvrouter.publisher.stream import ensure_stream
from kvrouter.runtime.context import open_runtime
from kvrouter.runtime.contracts import Indexer
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.devstack import EtcdServer, NatsServer
from kvrouter.runtime.discovery import Directory
from kvrouter.runtime.errors import (
    BadRequest,
    BlockSizeMismatch,
    DeadlineExceeded,
    KvRouterError,
    NotFound,
    NotReady,
    PromptTooLong,
)
from kvrouter.runtime.hosting import Hosted, host
from kvrouter.runtime.rpc import RpcServer, open_channel, remote
from kvrouter.v1 import indexer_pb2
from kvrouter.v1.common_pb2 import BlockScope, Component, MultimodalHash
from kvrouter.v1.indexer_pb2 import (
    DumpRequest,
    FindMatchesRequest,
    FindMatchesResponse,
    GetStatsRequest,
    LoadRequest,
    LocalHashes,
    TokenIds,
)
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import AppliedRecord, ComponentDescriptor, RankRegistration, WorkerRegistration
from nats.aio.client import Client
from prometheus_client import CollectorRegistry

from .event_batches import BLOCK_SIZE, RankSource, hashes, tokens
from .indexing import PATIENCE_SECONDS, connected

DESCRIPTOR = indexer_pb2.DESCRIPTOR.services_by_name["IndexerService"]
PROMPT = tokens(6)
T = TypeVar("T")


@dataclass
class Stack:
    """An Indexer and what it stands on."""

    indexer: Indexer
    server: RpcServer
    component: ComponentName
    nats: Client
    etcd: str
    directory: Directory

    @property
    def named(self) -> Component:
        return Component(namespace=self.component.namespace, name=self.component.name)

    async def put(self, key: str, message: Message) -> None:
        async with connect(self.etcd) as client:
            await client.put(key.encode(), message.SerializeToString())

    async def delete(self, key: str) -> None:
        async with connect(self.etcd) as client:
            await client.delete(key.encode())

    async def create_component(self) -> None:
        await self.put(
            self.component.descriptor_key,
            ComponentDescriptor(component=self.named, model="m", block_size=BLOCK_SIZE, hash_scheme="xxh3-1337"),
        )
        await self.find([])

    async def register(self, source: RankSource, model: str = "m") -> None:
        registration = WorkerRegistration(
            worker_id=source.worker_id,
            component=self.named,
            model=model,
            block_size=BLOCK_SIZE,
            hash_scheme="xxh3-1337",
            publishes_events=True,
            ranks=[RankRegistration(dp_rank=source.dp_rank, incarnation=source.incarnation)],
        )
        await self.put(self.component.worker_key(source.worker_id), registration)

    async def find(self, token_ids: list[int]) -> FindMatchesResponse:
        request = FindMatchesRequest(component=self.named, token_ids=TokenIds(ids=token_ids))
        return await answered(lambda: self.indexer.find_matches(request, deadline=soon()))

    async def follows(self, source: RankSource) -> None:
        wanted = (source.worker_id, source.dp_rank, source.incarnation, source.next_event_id)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                answer = await self.find([])
                columns = (answer.worker_ids, answer.dp_ranks, answer.incarnations, answer.next_event_ids)
                if wanted in zip(*columns, strict=True):
                    return
                await asyncio.sleep(0.01)


def soon() -> Deadline:
    return Deadline.after(PATIENCE_SECONDS)


async def answered(call: Callable[[], Awaitable[T]]) -> T:
    """The answer, once the component is known and restored."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                return await call()
            except (NotReady, NotFound):
                await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(settings: IndexerSettings, how: str) -> AsyncIterator[tuple[Indexer, RpcServer, Directory]]:
    """An Indexer with all that is around it in its process; how it is called: ``object`` or ``stub``."""
    stopping = asyncio.Event()
    server: asyncio.Future[RpcServer] = asyncio.get_running_loop().create_future()
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(open_runtime(settings))
        service = await stack.enter_async_context(running(settings, runtime))
        hosted = Hosted("indexer", DESCRIPTOR, service, lambda: service.ready)
        hosting = asyncio.create_task(host(runtime, [hosted], stopping, started=server.set_result))
        try:
            rpc = await server
            async with open_channel(f"127.0.0.1:{rpc.port}") as channel:
                stub = cast(Indexer, remote(DESCRIPTOR, channel))
                yield (cast(Indexer, service) if how == "object" else stub), rpc, runtime.directory
        finally:
            stopping.set()
            await hosting


@asynccontextmanager
async def watching(etcd: str, namespace: str) -> AsyncIterator[Directory]:
    """What etcd says, as others see it."""
    directory = Directory(etcd, namespace, CollectorRegistry())
    following = asyncio.create_task(directory.run())
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            yield directory
    finally:
        following.cancel()
        await asyncio.wait({following})


def settings_for(etcd: str, nats: str, component: ComponentName) -> IndexerSettings:
    return IndexerSettings(
        namespace=component.namespace,
        etcd=etcd,
        nats=nats,
        bind="127.0.0.1:0",
        http_bind="127.0.0.1:0",
        instance_id="indexer-1",
        max_prompt_tokens=1000,
        drain_seconds=1.0,
        worker_grace_seconds=0.2,
    )


@pytest.fixture
def component(namespace: str) -> ComponentName:
    return ComponentName(namespace, "decode")


@pytest.fixture(params=["object", "stub"])
async def stack(
    request: pytest.FixtureRequest, etcd_endpoint: str, nats_url: str, component: ComponentName
) -> AsyncIterator[Stack]:
    settings = settings_for(etcd_endpoint, nats_url, component)
    async with serving(settings, request.param) as (indexer, server, directory), connected(nats_url) as nats:
        yield Stack(indexer, server, component, nats, etcd_endpoint, directory)


async def test_tokens_and_local_hashes_find_the_same(stack: Stack) -> None:
    await stack.create_component()
    source = RankSource(stack.component, 7)
    await stack.register(source)
    await source.stored(PROMPT, 100).publish(stack.nats.jetstream())
    await stack.follows(source)
    longer = [*PROMPT, 1, 2, 3, 4, 5]
    by_tokens = await stack.find(longer)
    assert (list(by_tokens.worker_ids), list(by_tokens.device_blocks), by_tokens.prompt_blocks) == ([7], [6], 7)
    request = FindMatchesRequest(
        component=stack.named, local_hashes=LocalHashes(hashes=hashes(longer)), block_size=BLOCK_SIZE
    )
    assert await stack.indexer.find_matches(request, deadline=soon()) == by_tokens


async def test_a_scope_and_images_keep_prompts_apart(stack: Stack) -> None:
    await stack.create_component()
    source = RankSource(stack.component, 7)
    packed = local_hashes(PROMPT, BLOCK_SIZE, Scope(lora_name="poet"), [(1, 99)])
    source.stored(PROMPT, 100)
    del source.events[0].stored.local_hashes[:]
    source.events[0].stored.local_hashes.extend(struct.unpack(f"<{len(packed) // 8}Q", packed))
    await source.publish(stack.nats.jetstream())
    await stack.follows(source)
    assert list((await stack.find(PROMPT)).device_blocks) == [0]
    request = FindMatchesRequest(
        component=stack.named,
        token_ids=TokenIds(ids=PROMPT),
        scope=BlockScope(lora_name="poet"),
        multimodal_hashes=[MultimodalHash(block_index=1, hash=99)],
    )
    assert list((await stack.indexer.find_matches(request, deadline=soon())).device_blocks) == [6]
    request.ClearField("multimodal_hashes")
    assert list((await stack.indexer.find_matches(request, deadline=soon())).device_blocks) == [1]


async def test_bad_requests_get_typed_errors_and_leave_the_service_well(stack: Stack) -> None:
    await stack.create_component()
    prompt = TokenIds(ids=PROMPT)
    bad: list[tuple[FindMatchesRequest, type[KvRouterError]]] = [
        (FindMatchesRequest(component=stack.named), BadRequest),
        (FindMatchesRequest(token_ids=prompt), BadRequest),
        (FindMatchesRequest(component=Component(namespace="a b", name="c"), token_ids=prompt), BadRequest),
        (FindMatchesRequest(component=Component(namespace="other", name="c"), token_ids=prompt), NotFound),
        (FindMatchesRequest(component=stack.named, token_ids=prompt, block_size=32), BlockSizeMismatch),
        (FindMatchesRequest(component=stack.named, token_ids=TokenIds(ids=range(1001))), PromptTooLong),
        (
            FindMatchesRequest(component=stack.named, token_ids=prompt, scope=BlockScope(tenant="t" * 2000)),
            BadRequest,
        ),
        (
            FindMatchesRequest(component=stack.named, token_ids=prompt, multimodal_hashes=[MultimodalHash()] * 5000),
            BadRequest,
        ),
    ]
    for request, error in bad:
        with pytest.raises(error) as caught:
            await stack.indexer.find_matches(request, deadline=soon())
        assert caught.value.info.advice, request
    with pytest.raises(DeadlineExceeded):
        await stack.indexer.find_matches(bad[0][0], deadline=Deadline.after(0))
    assert (await stack.find(PROMPT)).prompt_blocks == 6


async def test_a_dump_loads_into_another_component(stack: Stack) -> None:
    await stack.create_component()
    sources = [RankSource(stack.component, worker, incarnation=5) for worker in (1, 2)]
    for source in sources:
        await (
            source.stored(PROMPT, 100 * source.worker_id)
            .removed(100 * source.worker_id + 3)
            .publish(stack.nats.jetstream())
        )
        await stack.follows(source)
    dumped = []
    async with aclosing(stack.indexer.dump(DumpRequest(component=stack.named), deadline=soon())) as chunks:
        dumped = [chunk.state async for chunk in chunks]
    assert [(state.rank.worker_id, len(state.blocks), state.last) for state in dumped] == [(1, 5, True), (2, 5, True)]

    copy = Stack(**{**vars(stack), "component": ComponentName(stack.component.namespace, "copy")})
    await copy.create_component()

    async def requests() -> AsyncIterator[LoadRequest]:
        for state in dumped:
            yield LoadRequest(component=copy.named, state=state)

    loaded = await copy.indexer.load(requests(), deadline=soon())
    assert (loaded.ranks, loaded.blocks) == (2, 10)
    assert await copy.find(PROMPT) == await stack.find(PROMPT)

    follower = RankSource(copy.component, 1, incarnation=5, next_event_id=sources[0].next_event_id)
    await follower.cleared().publish(copy.nats.jetstream())
    await copy.follows(follower)
    with pytest.raises(BadRequest, match="the index at"):
        await copy.indexer.load(requests(), deadline=soon())
    assert list((await copy.find(PROMPT)).device_blocks) == [0, 3]

    async def unfinished() -> AsyncIterator[LoadRequest]:
        yield LoadRequest(component=copy.named)

    with pytest.raises(BadRequest):
        await copy.indexer.load(unfinished(), deadline=soon())


async def test_figures_tell_what_arrived_and_from_whom(stack: Stack) -> None:
    await stack.create_component()
    js = stack.nats.jetstream()
    here, gone = RankSource(stack.component, 1), RankSource(stack.component, 2, dp_rank=3)
    await stack.register(here)
    await here.stored(PROMPT, 100).publish(js)
    await js.publish(here.subject, b"\xff")
    await gone.stored(PROMPT, 100).publish(js)
    await stack.follows(here)
    await stack.follows(gone)
    stats = await stack.indexer.get_stats(GetStatsRequest(), deadline=soon())
    assert stats.replica_id == "indexer-1"
    (figures,) = stats.components
    assert figures.component == stack.named
    assert figures.ready
    assert (figures.blocks, figures.events.applied, figures.events.unparsable) == (12, 2, 1)
    assert [(rank.rank.worker_id, rank.blocks, rank.registered) for rank in figures.ranks] == [
        (1, 6, True),
        (2, 6, False),
    ]
    assert 0 < figures.lag_seconds < PATIENCE_SECONDS


async def test_a_worker_that_differs_from_its_component_is_not_listened_to(stack: Stack) -> None:
    await stack.create_component()
    js = stack.nats.jetstream()
    fits, differs = RankSource(stack.component, 1), RankSource(stack.component, 2)
    await stack.register(differs, model="another")
    await stack.directory.wait_for(lambda directory: stack.component.worker_key(2) in directory.ignored)
    await differs.stored(PROMPT, 100).publish(js)
    await fits.stored(PROMPT, 100).publish(js)
    await stack.follows(fits)
    assert list((await stack.find(PROMPT)).worker_ids) == [1]


async def test_a_deregistered_workers_blocks_go_after_the_grace(stack: Stack) -> None:
    await stack.create_component()
    js = stack.nats.jetstream()
    stays, goes = RankSource(stack.component, 1), RankSource(stack.component, 2)
    for source in (stays, goes):
        await stack.register(source)
        await source.stored(PROMPT, 100).publish(js)
        await stack.follows(source)
    await stack.delete(stack.component.worker_key(2))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while list((await stack.find(PROMPT)).worker_ids) != [1]:
            await asyncio.sleep(0.01)


async def test_readiness_registration_and_applied_record(
    etcd_endpoint: str, nats_url: str, component: ComponentName
) -> None:
    settings = settings_for(etcd_endpoint, nats_url, component)
    async with (
        watching(etcd_endpoint, component.namespace) as watcher,
        serving(settings, "stub") as (indexer, server, directory),
        connected(nats_url) as nats,
    ):
        stack = Stack(indexer, server, component, nats, etcd_endpoint, directory)
        await watcher.wait_for(
            lambda seen: "indexer-1" in seen.services("indexer") and seen.services("indexer")["indexer-1"].ready
        )
        registration = watcher.services("indexer")["indexer-1"]
        assert registration.endpoint == f"127.0.0.1:{server.port}"
        async with open_channel(registration.endpoint) as channel:
            request = health_pb2.HealthCheckRequest(service="kvrouter.v1.IndexerService")
            answer = await health_pb2_grpc.HealthStub(channel).Check(request)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await stack.create_component()
        source = RankSource(component, 1)
        sequence = await source.stored(PROMPT, 100).publish(nats.jetstream())
        async with asyncio.timeout(PATIENCE_SECONDS):
            record = AppliedRecord()
            async with aclosing(watch_prefix(etcd_endpoint, component.applied_key("indexer-1"))) as changes:
                async for change in changes:
                    values = (
                        [change.value] if isinstance(change, Put) else list(getattr(change, "entries", {}).values())
                    )
                    record = AppliedRecord.FromString(values[0]) if values else record
                    if record.stream_sequence == sequence:
                        break
        assert record.stream == component.stream
        async with aiohttp.ClientSession() as http, http.get(f"http://{registration.http_endpoint}/metrics") as page:
            metrics = await page.text()
        labels = f'component="decode",namespace="{component.namespace}"'
        assert f"kvrouter_indexer_ready{{{labels}}} 1.0" in metrics
        assert f'kvrouter_indexer_events_total{{{labels},outcome="applied"}} 1.0' in metrics


async def test_it_is_not_ready_while_nats_is_away_and_recovers(
    etcd_endpoint: str, own_nats: NatsServer, component: ComponentName
) -> None:
    async with connected(own_nats.url) as nats:
        source = RankSource(component, 1)
        await ensure_stream(nats.jetstream(), component)
        await source.stored(PROMPT, 100).publish(nats.jetstream())
    await own_nats.stop()
    async with serving(settings_for(etcd_endpoint, own_nats.url, component), "stub") as (indexer, server, directory):
        request = FindMatchesRequest(
            component=Component(namespace=component.namespace, name=component.name), token_ids=TokenIds(ids=PROMPT)
        )
        with pytest.raises(NotReady):
            await indexer.find_matches(request, deadline=soon())
        assert not server.health.ready
        await own_nats.start()
        async with connected(own_nats.url) as nats:
            stack = Stack(indexer, server, component, nats, etcd_endpoint, directory)
            await stack.create_component()
            assert list((await stack.find(PROMPT)).device_blocks) == [6]


async def test_what_it_knows_outlives_etcd(own_etcd: EtcdServer, nats_url: str, component: ComponentName) -> None:
    settings = settings_for(own_etcd.endpoint, nats_url, component)
    async with serving(settings, "stub") as (indexer, server, directory), connected(nats_url) as nats:
        stack = Stack(indexer, server, component, nats, own_etcd.endpoint, directory)
        await stack.create_component()
        source = RankSource(component, 1)
        await stack.register(source)
        await source.stored(PROMPT, 100).publish(nats.jetstream())
        await stack.follows(source)
        await own_etcd.stop()
        await source.stored(tokens(2, seed=2), 200).publish(nats.jetstream())
        await stack.follows(source)
        assert list((await stack.find(PROMPT)).device_blocks) == [6]
        await own_etcd.start()
        async with watching(own_etcd.endpoint, component.namespace) as watcher:
            await watcher.wait_for(lambda seen: "indexer-1" in seen.services("indexer"))


async def test_the_process_starts_says_that_it_is_ready_and_ends_with_status_0(
    etcd_endpoint: str, nats_url: str, component: ComponentName
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrouter.indexer", "--namespace", component.namespace),
        *("--etcd", etcd_endpoint, "--nats", nats_url, "--instance-id", "alone"),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with watching(etcd_endpoint, component.namespace) as watcher:
            await watcher.wait_for(lambda seen: any(one.ready for one in seen.services("indexer").values()))
            process.send_signal(signal.SIGTERM)
            _, log = await process.communicate()
            assert process.returncode == 0, log.decode()
            await watcher.wait_for(lambda seen: not seen.services("indexer"))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
