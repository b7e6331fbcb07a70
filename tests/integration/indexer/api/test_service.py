"""The IndexerService as an object and behind gRPC: both answer alike."""

from __future__ import annotations

import asyncio
import signal
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial

import aiohttp
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvrouter.core import Scope, local_hashes
from kvrouter.devtools.system.servers import EtcdServer, NatsServer
from kvrouter.net.etcd import Put, watch_prefix
from kvrouter.net.nats.event_stream import ensure_stream
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import open_channel
from kvrouter.v1.common_pb2 import BlockScope, Component, LocalHashes, MultimodalHash, TokenIds
from kvrouter.v1.errors import (
    BadRequest,
    BlockSizeMismatch,
    DeadlineExceeded,
    KvRouterError,
    NotFound,
    NotReady,
    PromptTooLong,
)
from kvrouter.v1.indexer_pb2 import DumpRequest, FindMatchesRequest, GetStatsRequest, LoadRequest
from kvrouter.v1.names import ComponentName
from kvrouter.v1.pages import all_pages, whole
from kvrouter.v1.registry_pb2 import AppliedRecord

from ..event_batches import BLOCK_SIZE, RankSource, hashes, tokens
from ..indexing import PATIENCE_SECONDS, connected
from ..serving import Stack, serving, settings_for, soon, watching

PROMPT = tokens(6)


@pytest.fixture(params=["object", "stub"])
async def stack(
    request: pytest.FixtureRequest, etcd_endpoint: str, nats_url: str, component: ComponentName
) -> AsyncIterator[Stack]:
    settings = settings_for(etcd_endpoint, nats_url, component)
    async with serving(settings, request.param) as (indexer, server, directory), connected(nats_url) as nats:
        yield Stack(indexer, server, nats, directory, component=component, etcd=etcd_endpoint)


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
        await stack.register(source)
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
    for source in sources:
        await copy.register(source)

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


async def test_stats_count_events_by_rank(stack: Stack) -> None:
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
    while not any(rank.registered for component in stats.components for rank in component.ranks):
        await asyncio.sleep(0.01)
        stats = await stack.indexer.get_stats(GetStatsRequest(), deadline=soon())
    assert stats.replica_id == "indexer-1"
    (component,) = stats.components
    assert component.component == stack.named
    assert component.ready
    assert (component.blocks, component.events.applied, component.events.unparsable) == (12, 2, 1)
    assert [(rank.rank.worker_id, rank.blocks, rank.registered) for rank in component.ranks] == [
        (1, 6, True),
        (2, 6, False),
    ]
    assert 0 < component.lag_us < PATIENCE_SECONDS * 1e6


async def test_stats_of_more_ranks_than_a_page_holds_come_in_pages(stack: Stack) -> None:
    await stack.create_component()
    js = stack.nats.jetstream()
    sources = [RankSource(stack.component, worker_id) for worker_id in range(1, 8)]
    for source in sources:
        await stack.register(source)
        await source.stored(PROMPT, 100).publish(js)
    for source in sources:
        await stack.follows(source)
    call = partial(stack.indexer.get_stats, deadline=soon())
    sizes, found = [], []
    async for page in all_pages(call, GetStatsRequest(page_size=3)):
        (component,) = page.components
        assert (component.component, component.blocks) == (stack.named, 6 * len(sources))
        sizes.append(len(component.ranks))
        found += [rank.rank.worker_id for rank in component.ranks]
    assert sizes == [2, 3, 2], "the component is the first entry"
    assert found == [*range(1, 8)]
    merged = await whole(call, GetStatsRequest(page_size=3))
    assert [rank.rank.worker_id for rank in merged.components[0].ranks] == found
    assert not merged.next_page_token


async def test_a_worker_that_differs_from_its_component_is_not_listened_to(stack: Stack) -> None:
    await stack.create_component()
    js = stack.nats.jetstream()
    fits, differs = RankSource(stack.component, 1), RankSource(stack.component, 2)
    await stack.register(differs, model="another")
    assert stack.component.worker_key(2) in stack.directory.ignored
    await differs.stored(PROMPT, 100).publish(js)
    await fits.stored(PROMPT, 100).publish(js)
    await stack.follows(fits)
    assert list((await stack.find(PROMPT)).worker_ids) == [1]


async def test_a_deregistered_workers_blocks_go_after_the_grace(
    etcd_endpoint: str, nats_url: str, component: ComponentName
) -> None:
    settings = settings_for(etcd_endpoint, nats_url, component, worker_grace_seconds=0.2)
    async with serving(settings, "stub") as (indexer, server, directory), connected(nats_url) as nats:
        stack = Stack(indexer, server, nats, directory, component=component, etcd=etcd_endpoint)
        await stack.create_component()
        stays, goes = RankSource(component, 1), RankSource(component, 2)
        for source in (stays, goes):
            await stack.register(source)
            await source.stored(PROMPT, 100).publish(nats.jetstream())
            await stack.follows(source)
        await stack.delete(component.worker_key(2))
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
        stack = Stack(indexer, server, nats, directory, component=component, etcd=etcd_endpoint)
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
            stack = Stack(indexer, server, nats, directory, component=component, etcd=etcd_endpoint)
            await stack.create_component()
            assert list((await stack.find(PROMPT)).device_blocks) == [6]


async def test_what_it_knows_outlives_etcd(own_etcd: EtcdServer, nats_url: str, component: ComponentName) -> None:
    settings = settings_for(own_etcd.endpoint, nats_url, component)
    async with serving(settings, "stub") as (indexer, server, directory), connected(nats_url) as nats:
        stack = Stack(indexer, server, nats, directory, component=component, etcd=own_etcd.endpoint)
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
