"""A sidecar in the test's process, a simulated engine server beside it, and a client of the worker between them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from kvrouter.devtools.system.ports import free_port, free_ports
from kvrouter.mocker.serving.http import ServedEngine
from kvrouter.mocker.settings import MockerSettings
from kvrouter.mocker.sglang.app import serving_sglang
from kvrouter.mocker.vllm.app import serving_vllm
from kvrouter.net.etcd import connect
from kvrouter.publisher.worker import Worker
from kvrouter.publisher.worker_server import SERVICE
from kvrouter.runtime.telemetry.health import HealthBoard
from kvrouter.sidecar.app import running
from kvrouter.sidecar.settings import SidecarSettings
from kvrouter.sidecar.supervisor import EngineSupervisor
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import WorkerRegistration
from kvrouter.v1.worker_pb2 import GenerateOutput, WorkerServiceGenerateRequest, WorkerServiceGenerateResponse
from prometheus_client import CollectorRegistry

from ...waiting import until

BLOCK = 4


def write_engine_keys(path: Path, **keys: str) -> str:
    """Writes the keys of components, and returns the path."""
    path.touch(0o600)
    path.write_text("".join(f'{component} = "{key}"\n' for component, key in keys.items()))
    return str(path)


def events_at(live: int = 0, replay: int = 0) -> str:
    """Returns the engine's configuration of events on two ports; 0 for free ones."""
    endpoints = {"endpoint": f"tcp://*:{live}", "replay_endpoint": f"tcp://*:{replay}"}
    return json.dumps({"enable_kv_cache_events": True, "topic": "kv"} | endpoints)


Serving = Callable[[MockerSettings, CollectorRegistry], AbstractAsyncContextManager[ServedEngine]]


@dataclass(frozen=True)
class EngineServer:
    """A simulated engine server that can be started again at its address."""

    bind: str
    serving: Serving
    options: dict[str, Any]

    @property
    def url(self) -> str:
        return f"http://{self.bind}"

    @asynccontextmanager
    async def started(self, **options: Any) -> AsyncIterator[ServedEngine]:
        chosen = MockerSettings(bind=self.bind, **({"mean_output_tokens": 0} | self.options | options))
        async with self.serving(chosen, CollectorRegistry()) as server:
            yield server


def vllm(**options: Any) -> EngineServer:
    return _server(serving_vllm, {"openai": True} | options)


def sglang(**options: Any) -> EngineServer:
    # SGLang names the first ports only, so that those of the other ranks must follow.
    ranks = options.get("dp_size", 1)
    live = free_ports(2 * ranks)[0]
    endpoints = {"endpoint": f"tcp://*:{live}", "replay_endpoint": f"tcp://*:{live + ranks}"}
    events = json.dumps({"publisher": "zmq"} | endpoints)
    return _server(serving_sglang, {"sglang": True, "kv_events_config": events} | options)


def _server(serving: Serving, options: dict[str, Any]) -> EngineServer:
    known: dict[str, Any] = {
        "model": "m",
        "model_path": "org/m",
        "block_size": BLOCK,
        "num_blocks": 64,
        "clock_factor": 50,
        "kv_events_config": events_at(),
        "drain_seconds": 0.1,
    }
    return EngineServer(f"127.0.0.1:{free_port()}", serving, known | options)


class Sidecar:
    """A running sidecar with one engine."""

    def __init__(self, supervisor: EngineSupervisor, registry: CollectorRegistry, health: HealthBoard) -> None:
        self.supervisor = supervisor
        self.health = health
        self._registry = registry

    @property
    def worker(self) -> Worker:
        worker = self.supervisor._worker
        assert worker is not None, "the engine is not registered"
        return worker

    async def ready(self) -> None:
        await until(lambda: self.health.ready)

    def blocks(self, dp_rank: int = 0) -> set[int]:
        """Returns the engine hashes of the rank's resident blocks."""
        chunks = self.worker.rank(dp_rank).state_chunks()
        return {block.engine_hash for chunk in chunks for block in chunk.blocks}

    def count(self, name: str, **labels: str) -> float:
        of_worker = {"worker_id": str(self.supervisor.options.worker_id)} | labels
        return self._registry.get_sample_value(f"kvrouter_sidecar_{name}", of_worker) or 0.0

    async def generate(self, tokens: list[int], max_tokens: int = 4, **fields: Any) -> list[GenerateOutput]:
        """Returns the outputs of a request."""
        return [output async for output in self.outputs(tokens, max_tokens, **fields)]

    async def outputs(self, tokens: list[int], max_tokens: int = 4, **fields: Any) -> AsyncIterator[GenerateOutput]:
        request = WorkerServiceGenerateRequest(
            request_id=fields.pop("request_id", "r"),
            token_ids=tokens,
            stop_conditions={"max_tokens": max_tokens, "ignore_eos": True},
            **fields,
        )
        async with grpc.aio.insecure_channel(self.worker.endpoint) as channel:
            generate: Any = channel.unary_stream(
                f"/{SERVICE}/Generate",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=WorkerServiceGenerateResponse.FromString,
            )
            call = generate(request)
            try:
                async for response in call:
                    yield response.output
            finally:
                call.cancel()  # gRPC leaves calls of a closed channel running.


ENDLESS = {"num_blocks": 1 << 16, "clock_factor": 1}
"""Options of an engine with room for requests that do not end during a test, and slow enough for their reader."""
ENDLESS_TOKENS = 200_000

Beside = Callable[..., AbstractAsyncContextManager[Sidecar]]
"""Runs a sidecar beside the engines at some URLs, with options."""


def tokens_of(outputs: list[GenerateOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@asynccontextmanager
async def beside(namespace: str, etcd: str, nats: str, *urls: str, **options: Any) -> AsyncIterator[Sidecar]:
    """Runs a sidecar beside the engine at the first URL; further ones are served, too."""
    known: dict[str, Any] = {
        "namespace": namespace,
        "etcd": etcd,
        "nats": nats,
        "engine": urls,
        "drain_seconds": 0.2,
        "load_seconds": 0.05,
        "replay_seconds": 5.0,
    }
    registry, health = CollectorRegistry(), HealthBoard()
    async with running(SidecarSettings(**(known | options)), registry, health) as engines:
        yield Sidecar(engines.supervisors[0], registry, health)


def cached(server: ServedEngine, dp_rank: int = 0) -> set[int]:
    """Returns the engine hashes of the blocks in a rank's cache."""
    return set(server.service.drivers[dp_rank].engine.cached_blocks())


def cached_tokens_of(outputs: list[GenerateOutput]) -> list[int]:
    return [output.cached_tokens for output in outputs if output.HasField("cached_tokens")]


async def until_registered(
    namespace: str, etcd: str, worker_id: int, condition: Callable[[WorkerRegistration], bool]
) -> WorkerRegistration:
    """Returns a worker's registration once a condition holds for it."""
    async with asyncio.timeout(30):
        while not condition(found := await registration(namespace, etcd, worker_id)):
            await asyncio.sleep(0.02)
    return found


async def registration(namespace: str, etcd: str, worker_id: int) -> WorkerRegistration:
    async with connect(etcd) as client:
        found = await client.get(ComponentName(namespace, "workers").worker_key(worker_id).encode())
    assert found is not None
    return WorkerRegistration.FromString(found.value)
