"""kvrouter before vLLM servers, each way: with sidecars that forward or send tokens, and in one process."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from array import array
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import aiohttp
from kvrouter.devtools.system.ports import free_ports
from kvrouter.devtools.system.processes import Command, ManagedProcess
from kvrouter.runtime.contracts import Frontend, Indexer, Scheduler
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import frontend_pb2, indexer_pb2, scheduler_pb2
from kvrouter.v1.common_pb2 import Component, RoutingRequest, TokenIds
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.frontend_pb2 import FrontendServiceFindMatchesRequest
from kvrouter.v1.indexer_pb2 import DumpRequest

from ...integration.sidecar.rig import write_engine_keys
from .engine import BLOCK, KEY, MODEL, Published, VllmServer

Way = Literal["sidecar", "sidecar-tokens", "one-process"]
WAYS: tuple[Way, ...] = ("sidecar", "sidecar-tokens", "one-process")


@dataclass(frozen=True)
class Where:
    """The brokers, and the namespace of a test."""

    namespace: str
    nats: str
    etcd: str

    @property
    def settings(self) -> dict[str, str]:
        return {"namespace": self.namespace, "nats": self.nats, "etcd": self.etcd}

    @property
    def options(self) -> tuple[str, ...]:
        return ("--namespace", self.namespace, "--nats", self.nats, "--etcd", self.etcd)


@dataclass(frozen=True)
class Answer:
    """What a client sees of a request."""

    status: int
    routed_on: str
    worker: str
    predicted: int
    """Tokens that the router expected in the worker's cache."""
    body: Any
    """The response, or the chunks of its stream."""

    @property
    def reported(self) -> int:
        """Tokens that the engine found in its cache."""
        usage = (self.body if isinstance(self.body, dict) else self.body[-1])["usage"]
        return (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0

    @property
    def sequence(self) -> list[int]:
        """The token ids of prompt and output."""
        chunks = self.body if isinstance(self.body, list) else [self.body]
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        prompts = [chunk.get("prompt_token_ids") for chunk in chunks]
        prompts += [choice.get("prompt_token_ids") for choice in choices]
        prompt = next(each for each in prompts if each)
        output = [token for choice in choices for token in choice.get("token_ids") or ()]
        return array("I", [*prompt, *output]).tolist()


class Routed:
    """A router before vLLM servers."""

    def __init__(self, http: str, channel: Any, component: Component, session: aiohttp.ClientSession) -> None:
        self.http = http
        self.session = session
        frontend = frontend_pb2.DESCRIPTOR.services_by_name["FrontendService"]
        indexer = indexer_pb2.DESCRIPTOR.services_by_name["IndexerService"]
        self._frontend = cast(Frontend, remote(frontend, channel))
        self._indexer = cast(Indexer, remote(indexer, channel))
        scheduler = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]
        self._scheduler = cast(Scheduler, remote(scheduler, channel))
        self._component = component

    async def post(self, body: dict[str, Any]) -> Answer:
        """Sends a chat or a completion."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        sent = body | {"model": MODEL, "return_token_ids": True, "ignore_eos": True}
        if body.get("stream"):
            sent["stream_options"] = {"include_usage": True}
        async with self.session.post(self.http + path, json=sent) as response:
            read: Any = await response.read()
            if response.content_type == "text/event-stream":
                events = [line.removeprefix(b"data: ") for line in read.splitlines() if line.startswith(b"data: ")]
                assert events[-1] == b"[DONE]", events[-1]
                read = [json.loads(event) for event in events[:-1]]
            else:
                read = json.loads(read)
            headers = response.headers
            overlap = int(headers.get("x-kvrouter-overlap-blocks", 0)) * BLOCK
            routed_on, worker = headers.get("x-kvrouter-routed-on", ""), headers.get("x-kvrouter-worker", "")
            return Answer(response.status, routed_on, worker, overlap, read)

    async def overlaps(self, tokens: list[int]) -> int:
        """Returns how many leading blocks of a sequence the worker has that has most of them."""
        request = FrontendServiceFindMatchesRequest(request=RoutingRequest(model=MODEL, token_ids=TokenIds(ids=tokens)))
        answer = await self._frontend.find_matches(request, deadline=Deadline.after(10))
        return max((each.device_blocks for each in answer.overlaps), default=0)

    async def until_indexed(self, tokens: list[int]) -> None:
        """Returns when the index has all blocks of a sequence that the engine has computed and cached."""
        async with asyncio.timeout(30):
            # The last token is returned and not computed.
            while await self.overlaps(tokens) < (len(tokens) - 1) // BLOCK:
                await asyncio.sleep(0.01)

    async def blocks(self) -> dict[int, set[int]]:
        """Returns the engine hashes of each worker's blocks in the index."""
        found: dict[int, set[int]] = {}
        request = DumpRequest(component=self._component)
        async for chunk in self._indexer.dump(request, deadline=Deadline.after(30)):
            known = found.setdefault(chunk.state.rank.worker_id, set())
            known.update(block.engine_hash for block in chunk.state.blocks)
        return found

    async def until_applied(self, *servers: Published) -> None:
        """Returns when the index has of each server what the server says it holds, and nothing else."""
        async with asyncio.timeout(60):
            while True:
                held = sorted([sorted(await server.blocks()) for server in servers])
                known = sorted(sorted(blocks) for blocks in (await self.blocks()).values())
                if [each for each in known if each] == [each for each in held if each]:
                    return
                await asyncio.sleep(0.05)

    async def until_ready(self, workers: int) -> None:
        """Returns when chats are routed on their tokens, and each worker is known and takes requests."""
        chat = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
        async with asyncio.timeout(120):
            while True:
                try:
                    answer = await self.post(chat)
                    if answer.status == 200 and answer.routed_on == "tokens" and await self._workers() == workers:
                        return
                except (aiohttp.ClientError, KvRouterError):
                    pass
                await asyncio.sleep(0.2)

    async def _workers(self) -> int:
        stats = await self._indexer.get_stats(indexer_pb2.GetStatsRequest(), deadline=Deadline.after(10))
        verified = {rank.rank.worker_id for each in stats.components for rank in each.ranks if rank.verified}
        # A sidecar lets a server that has come back take requests once it has described itself.
        status = await self._scheduler.get_status(scheduler_pb2.GetStatusRequest(), deadline=Deadline.after(10))
        ranks = [rank for each in status.components for rank in each.ranks if rank.registered and not rank.draining]
        return sum(rank.rank.worker_id in verified for rank in ranks)


@asynccontextmanager
async def routing(way: Way, where: Where, logs: Path, *servers: VllmServer) -> AsyncIterator[Routed]:
    """Runs kvrouter before servers that run."""
    http, grpc = free_ports(2)
    engines = [argument for server in servers for argument in ("--engine", server.url)]
    keys = ("--engine-keys-file", write_engine_keys(logs / "keys.toml", workers=KEY))
    kvrouter = (sys.executable, "-m", "kvrouter.cli.main")
    router = (*kvrouter, "serve", "--port", str(http), "--bind", f"127.0.0.1:{grpc}", "--drain-seconds", "1")
    tokenizer = ("--tokenizers", f"{MODEL}={servers[0].model}")
    if way == "one-process":
        commands = {"router": (*router, *engines, *keys, *tokenizer, "--http-bind", "")}
    else:
        sidecar = (*kvrouter, "sidecar", *where.options, *engines, *keys, "--worker-id", "1", "--drain-seconds", "1")
        forward = ("--forward", "no") if way == "sidecar-tokens" else ()
        commands = {
            "router": (*router, *where.options, *keys, "--http-bind", ""),
            "sidecar": (*sidecar, *forward, "--tokenizer", str(servers[0].model), "--lease-seconds", "2"),
        }
    environment = dict(os.environ) | {"XDG_RUNTIME_DIR": str(logs)}
    component = Component(namespace=where.namespace if way != "one-process" else "kvrouter", name="workers")
    async with AsyncExitStack() as stack:
        for name, command in commands.items():
            process = await ManagedProcess.start(Command(name, command, environment), logs)
            stack.push_async_callback(process.stop, 20)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        channel = await stack.enter_async_context(open_channel(f"127.0.0.1:{grpc}"))
        routed = Routed(f"http://127.0.0.1:{http}", channel, component, session)
        await routed.until_ready(len(servers))
        yield routed
