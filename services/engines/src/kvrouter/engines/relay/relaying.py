"""Publishes the events of an engine as those of a worker, whatever serves the worker's requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TypeAlias

import structlog
from kvrouter.engines.events.translation import EventTranslator, TranslationOptions
from kvrouter.engines.events.vllm_sglang_events import Dialect
from kvrouter.engines.relay.engine_sockets import Endpoints, EngineSockets
from kvrouter.engines.relay.rank_relay import InitialReplay, RankRelay, begin_replay
from kvrouter.publisher import worker as sdk
from kvrouter.publisher.config import WorkerConfig
from kvrouter.publisher.publishing.rank_publisher import RankPublisher
from kvrouter.publisher.registration import System
from kvrouter.publisher.snapshots.resume import claimed, discard, recover_worker

log = structlog.get_logger(component="relay")

_NO_POSITION = -1

RelayedRank: TypeAlias = tuple[RankRelay, EventTranslator, RankPublisher]
"""The parts of a relayed rank."""
RelayedRanks: TypeAlias = dict[int, RelayedRank]
"""Those of each rank of a worker."""


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where and how an engine publishes."""

    endpoints: Mapping[int, Endpoints]
    """By data-parallel rank."""
    dialect: Dialect
    """Whose event format the engine has."""
    queued_messages: int
    """Messages queued in each subscription; further ones are replayed."""
    replay_seconds: float
    """Longest time between two messages of a replay."""


@asynccontextmanager
async def relaying(
    config: WorkerConfig,
    source: EventSource,
    options: TranslationOptions,
    parts: RelayedRanks,
    on_connection: Callable[[], None],
    *,
    engine: sdk.StepEngine | sdk.Engine | None = None,
    system: System | None = None,
    wait_for_engine: bool = True,
) -> AsyncIterator[sdk.Worker]:
    """Runs a worker with the engine's events while the context lasts. Asks the engine's replay sockets first.

    Args:
        config: The worker.
        source: Where its engine publishes.
        options: Facts about the engine, missing in its events.
        parts: Filled with the parts of each rank.
        on_connection: Called when a rank's publisher connected or disconnected.
        engine: Serves the worker's requests; none refuses them.
        system: Where the worker registers and publishes; by default the etcd and the NATS of its configuration.
        wait_for_engine: Whether the first answer of a replay socket may take any time, for a loading engine.

    Raises:
        DescriptorMismatch: the worker does not match its component.
        EndpointRefused: an endpoint cannot be used.
        ReplayFailed: a replay socket does not answer, or with something else.
    """
    async with AsyncExitStack() as stack:
        sockets = {
            dp_rank: await stack.enter_async_context(
                EngineSockets(endpoints, high_water_mark=source.queued_messages, replay_seconds=source.replay_seconds)
            )
            for dp_rank, endpoints in source.endpoints.items()
        }
        stack.enter_context(claimed(config))
        states, blocks = await asyncio.to_thread(recover_worker, config)
        known = {dp_rank: state.position for dp_rank, state in states.items()}
        initial = await _begin_replays(sockets, known, wait_for_engine=wait_for_engine)
        if not all(replay.resumes for replay in initial.values()):
            if states:
                log.warning(
                    "relay.state_dropped",
                    worker_id=config.worker_id,
                    blocks=sum(blocks.values()),
                    reason="the engine is another one than before, or cannot repeat all of its messages since",
                )
            discard(config)
            states = {}
        worker = await stack.enter_async_context(sdk.running(config, engine, system, recovered=states))
        if not worker.resumed:
            initial = await _begin_replays(sockets, {}, initial, wait_for_engine=wait_for_engine)
        for dp_rank in source.endpoints:
            publisher = worker.rank(dp_rank)
            translator = EventTranslator(publisher, options)
            relay = RankRelay(dp_rank, sockets[dp_rank], translator, source.dialect, on_connection)
            if worker.resumed:
                relay.counts.restored_blocks = blocks[dp_rank]
            else:
                relay.counts.dropped_blocks = blocks.get(dp_rank, 0)
            parts[dp_rank] = relay, translator, publisher
        async with asyncio.TaskGroup() as tasks:
            following = [tasks.create_task(relay.run(initial[rank])) for rank, (relay, _, _) in parts.items()]
            try:
                yield worker
            finally:
                for task in following:
                    task.cancel()


async def _begin_replays(
    sockets: dict[int, EngineSockets],
    known: dict[int, int],
    former: dict[int, InitialReplay] | None = None,
    *,
    wait_for_engine: bool,
) -> dict[int, InitialReplay]:
    """Returns the initial replay of each rank, from the position of its state if it is known.

    Those in ``former`` that begin at the engine's oldest message are kept.
    """
    initial = {}
    for dp_rank, each in sockets.items():
        replay = former.get(dp_rank) if former else None
        if replay is not None and replay.position >= 0:
            if replay.rest is not None:
                await replay.rest.aclose()
            replay = None
        position = known.get(dp_rank, _NO_POSITION)
        initial[dp_rank] = replay or await begin_replay(each, position, wait_for_engine=wait_for_engine)
    return initial
