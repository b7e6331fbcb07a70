"""A worker over the SDK whose engine has one chosen defect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Literal

from kvrouter.core import Scope, local_hashes
from kvrouter.publisher.errors import RequestRefused
from kvrouter.publisher.publishing.rank_publisher import RankPublisher
from kvrouter.publisher.serving.outputs import RequestOutput
from kvrouter.publisher.worker import Worker
from kvrouter.publisher.worker_server import WorkerServer
from kvrouter.v1.common_pb2 import Rank
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.worker_pb2 import FinishReason, GetLoadResponse, WorkerServiceGenerateRequest

BLOCK = 8
MAX_MODEL_LEN = 4096
_INCARNATION = 5

Fault = Literal[
    "none",
    "no events",
    "no block size",
    "other block size",
    "other tokens",
    "shifted tokens",
    "other parent",
    "first block only",
    "other scope",
    "no hits",
    "hits of everything",
    "no cached tokens",
    "salt ignored",
    "salt unreported",
    "abort ignored",
    "output goes on",
    "answers everything",
    "fails on bad requests",
    "never finishes",
    "too many tokens",
    "no load",
    "no call stream",
    "call stream missing",
]


class FaultyEngine:
    """Echoes prompts, and caches their blocks. Prompts of whole blocks are answered until they are aborted."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.running: dict[str, asyncio.Task[None]] = {}
        self.server: WorkerServer | Worker | None = None
        self.rank = RankPublisher(
            subject="", worker_id=1, dp_rank=0, incarnation=_INCARNATION, block_size=BLOCK, total_blocks=1000
        )
        self._cache: dict[tuple[str, tuple[int, ...]], int] = {}

    def submit(self, request: WorkerServiceGenerateRequest) -> None:
        bad = len(request.token_ids) >= MAX_MODEL_LEN or request.scope.lora_name
        if bad and self.fault == "fails on bad requests":
            raise ZeroDivisionError
        if bad and self.fault != "answers everything":
            raise RequestRefused("no such adapter, or a prompt that is too long")
        task = asyncio.create_task(self._run(request))
        self.running[request.request_id] = task
        task.add_done_callback(lambda _: self.running.pop(request.request_id, None))

    async def abort(self, request_ids: Sequence[str]) -> int:
        tasks = [task for each in request_ids if (task := self.running.get(each))]
        if self.fault != "abort ignored":
            for task in tasks:
                task.cancel()
        return len(tasks)

    def load(self) -> Mapping[int, LoadReport]:
        if self.fault == "no load":
            return {}
        running = len(self.running)
        return {0: LoadReport(running_requests=running, active_blocks=4 * running, total_blocks=1000)}

    def load_response(self) -> GetLoadResponse:
        response = GetLoadResponse(
            model="m",
            block_size=0 if self.fault == "no block size" else BLOCK,
            serves_call_stream=self.fault != "no call stream",
        )
        for report in self.load().values():
            report.rank.CopyFrom(Rank(worker_id=1))
            report.incarnation = _INCARNATION
            response.reports.append(report)
        return response

    async def _run(self, request: WorkerServiceGenerateRequest) -> None:
        tokens = tuple(request.token_ids)
        cached: int | None = self._store(tokens, "" if self.fault == "salt ignored" else request.scope.cache_salt)
        assert self.server is not None
        if self.fault == "no hits":
            cached = 0
        elif self.fault == "hits of everything":
            cached = len(tokens) // BLOCK * BLOCK
        elif self.fault == "no cached tokens":
            cached = None
        left = min(request.stop_conditions.max_tokens, 10_000)
        if self.fault == "too many tokens":
            left += 1
        while left:
            left -= 1
            output = RequestOutput(request.request_id, [tokens[0]], cached_tokens=cached)
            cached = None
            if not left:
                is_open = self.fault == "never finishes"
                output.finish_reason = (
                    FinishReason.FINISH_REASON_ERROR if is_open else FinishReason.FINISH_REASON_LENGTH
                )
            self.server.emit([output])
            await asyncio.sleep(0.005)

    def _store(self, tokens: tuple[int, ...], salt: str) -> int:
        keys = [(salt, tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
        hits = sum(key in self._cache for key in keys)
        for number, key in list(enumerate(keys))[hits:]:
            self._cache[key] = len(self._cache) + 1
            self._report(tokens, key, None if number == 0 else self._cache[keys[number - 1]])
        return hits * BLOCK

    def _report(self, prompt: tuple[int, ...], key: tuple[str, tuple[int, ...]], parent: int | None) -> None:
        salt, prefix = key
        tokens, size, scope = prefix[-BLOCK:], BLOCK, Scope(cache_salt=salt)
        match self.fault:
            case "no events":
                return
            case "first block only" if parent is not None:
                return
            case "other block size":
                size = BLOCK // 2
            case "other tokens":
                tokens = tuple(token + 1 for token in tokens)
            case "shifted tokens":
                tokens = prompt[len(prefix) - BLOCK + 1 : len(prefix) + 1]
            case "other parent":
                parent = None
            case "other scope":
                scope = Scope(cache_salt="salt")
            case "salt unreported":
                scope = Scope()
        parts = BLOCK // size
        self.rank.stored_hashes(
            local_hashes=local_hashes(tokens, size, scope)[-8 * parts :],
            engine_hashes=[self._cache[key] * 10 + part for part in range(parts)],
            parent=None if parent is None else parent * 10 + parts - 1,
        )


@asynccontextmanager
async def serving(fault: Fault) -> AsyncIterator[str]:
    """Serves a worker with a defect, without etcd and NATS; yields its address."""
    engine = FaultyEngine(fault)
    server = engine.server = WorkerServer(engine, {0: engine.rank}, engine.load_response)
    if fault == "call stream missing":
        server.grpc.call_streams.handlers = dict  # type: ignore[method-assign]
    endpoint = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
    try:
        yield endpoint
    finally:
        await server.stop(0)
        for task in list(engine.running.values()):
            task.cancel()
