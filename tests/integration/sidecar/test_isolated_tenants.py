"""A client with a key tries every field, option and header of the engines to read the cache of an isolated tenant."""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest
from kvrouter.core import Scope, local_hashes
from kvrouter.engines.fields import INTERNAL, ROUTED
from kvrouter.frontend.access.key_file import TenantEntry
from kvrouter.mocker.serving.http import ServedEngine
from kvrouter.publisher.worker import WorkerConfig, running
from kvrouter.v1 import frontend_pb2_grpc
from kvrouter.v1.common_pb2 import BlockScope
from kvrouter.v1.names import ComponentName
from kvrouter.v1.worker_pb2 import SamplingOptions, StopConditions

from ...waiting import until
from ..frontend.access.keys import Keys
from ..frontend.gateway import MODEL, System, request, running_system
from .rig import BLOCK, Beside, EngineServer, Sidecar, sglang, vllm

PROMPT = list(range(1, 1 + 12 * BLOCK))
LORA = {"lora_modules": {"tuned": "org/tuned"}}
SERVERS = [
    pytest.param(vllm, id="vllm"),
    pytest.param(sglang, id="sglang"),
]
_PATH = "/v1/completions"


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    """Keys of an isolated tenant, of another client, and of an administrator."""
    made = Keys(tmp_path / "keys.json")
    made.add("victim", tenant="t", models=[MODEL])
    made.add("attacker", tenant="u", models=[MODEL])
    made.add("admin", role="admin")
    made.tenants = [TenantEntry(name="t", isolated=True)]
    made.write()
    return made


@dataclass
class Target:
    """A system with keys and one engine."""

    system: System
    engine: ServedEngine
    keys: Keys
    http: aiohttp.ClientSession
    stub: Any
    sidecar: Sidecar | None = None
    _numbers: Any = field(default_factory=itertools.count)

    async def complete(
        self, key: str, sent: Mapping[str, Any] | str = "", path: str = _PATH, **headers: str
    ) -> tuple[int, Any]:
        """Sends the prompt over HTTP, and returns the status and the response."""
        body: Any = sent
        if not isinstance(sent, str) or not sent:
            body = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 4} | dict(sent or {}))
        headers |= {"authorization": f"Bearer {self.keys[key]}", "content-type": "application/json"}
        async with self.http.post(f"http://{self.system.http}{path}", data=body, headers=headers) as response:
            return response.status, await response.json()

    async def cached(self, key: str, sent: Mapping[str, Any] | str = "", path: str = _PATH, **headers: str) -> int:
        """Returns the prompt tokens that the engine found in its cache; -1 if the request is refused."""
        status, answer = await self.complete(key, sent, path, **headers)
        if status == 403:
            return -1
        assert status == 200, answer
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def cached_over_grpc(self, key: str, options: Mapping[str, Any], **scope: str) -> int:
        """Does the same through the sidecar, with options for the engine."""
        sent = request(
            PROMPT,
            model=MODEL,
            scope=BlockScope(**scope),
            sampling_options=SamplingOptions(engine_options_json=json.dumps(options) if options else ""),
            stop_conditions=StopConditions(max_tokens=4),
        )
        cached = 0
        try:
            metadata = (("authorization", f"Bearer {self.keys[key]}"),)
            async for piece in self.stub.Generate(sent, metadata=metadata):
                cached += piece.output.cached_tokens
        except grpc.aio.AioRpcError as failed:
            if failed.code() is grpc.StatusCode.PERMISSION_DENIED:
                return -1
            raise
        return cached

    def reported(self) -> set[int]:
        """Returns the local hashes of the blocks that the sidecar reports."""
        assert self.sidecar is not None
        chunks = self.sidecar.worker.rank(0).state_chunks()
        return {block.local_hash for chunk in chunks for block in chunk.blocks}

    @property
    def fresh(self) -> str:
        """A salt that nobody has used."""
        return f"fresh-{next(self._numbers)}"

    @property
    def guesses(self) -> list[str]:
        """What an attacker may know or guess of the victim's salt, the keyed salt included."""
        keyed = self.keys.salts.of("t", "")
        return ["t", "tenant:t", "tenant:t:", "tenant:t:s", "s", keyed, keyed + keyed, keyed[: len(keyed) // 2]]


@asynccontextmanager
async def target(
    server: EngineServer, run: Beside, keys: Keys, where: tuple[str, str, str], **options: Any
) -> AsyncIterator[Target]:
    namespace, etcd_endpoint, nats_url = where
    async with (
        running_system(nats_url, etcd_endpoint, namespace, **keys.options()) as system,
        server.started(model=MODEL, enable_prompt_tokens_details=True, num_blocks=1 << 14, **LORA) as engine,
        run(server.url, worker_id=1, **options) as sidecar,
        aiohttp.ClientSession() as http,
        grpc.aio.insecure_channel(system.target) as channel,
    ):
        await sidecar.ready()
        await system.until_candidate(1)
        yield Target(system, engine, keys, http, frontend_pb2_grpc.FrontendServiceStub(channel), sidecar)


@pytest.fixture
def where(namespace: str, etcd_endpoint: str, nats_url: str) -> tuple[str, str, str]:
    return namespace, etcd_endpoint, nats_url


@pytest.mark.parametrize("server", SERVERS)
async def test_no_field_option_or_header_reads_an_isolated_tenants_cache(
    server: Any, run: Beside, keys: Keys, where: tuple[str, str, str]
) -> None:
    async with target(server(), run, keys, where) as tried:
        for salt in ("", "s"):
            given = {"cache_salt": salt} if salt else {}
            assert await tried.cached("victim", given) == 0
            assert await tried.cached("victim", given) > 0
        # The victim shares its cache with itself whichever API it uses.
        assert await tried.cached_over_grpc("victim", {}, cache_salt="s") > 0
        keyed = keys.salts.of("t", "")
        for name in sorted(INTERNAL - ROUTED):
            for value in (keyed, [keyed], {"cache_salt": keyed}, "tenant:t:"):
                assert await tried.cached("attacker", {"cache_salt": tried.fresh, name: value}) == -1
            assert await tried.cached_over_grpc("attacker", {name: keyed}, cache_salt=tried.fresh) == -1
        for name in ROUTED:
            assert await tried.cached_over_grpc("attacker", {name: keyed}) == -1
        for guess in tried.guesses[1:]:
            assert await tried.cached("attacker", {"cache_salt": guess}) == 0
            assert await tried.cached_over_grpc("attacker", {}, cache_salt=f"{guess} ") == 0
            assert await tried.cached_over_grpc("attacker", {}, tenant=guess) == -1
            # A field that comes twice, or is written with escapes, counts once.
            prompt = f'"model": "{MODEL}", "prompt": {PROMPT}, "max_tokens": 4'
            twice = f'{{"cache_salt": "{guess}", {prompt}, "cache_salt": "{tried.fresh}"}}'
            status, answer = await tried.complete("attacker", twice)
            assert status in {200, 400}
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"] if status == 200 else 0
            assert cached == 0
            escaped = f'{{{prompt}, "cache\\u005fsalt": "{tried.fresh}", "extra\\u005fkey": "{guess}"}}'
            assert await tried.cached("attacker", escaped) == -1
            for header in (
                "x-override-rid",
                "x-override-conversation-id",
                "x-session-id",
                "x-request-id",
                "cache_salt",
            ):
                assert await tried.cached("attacker", {"cache_salt": tried.fresh}, **{header: guess}) == 0
        for model in (f"{MODEL}:tuned", "tuned"):
            status, _ = await tried.complete("attacker", {"model": model})
            assert status == 403


@pytest.mark.parametrize("server", SERVERS)
async def test_the_index_gets_the_blocks_of_an_isolated_tenant_with_the_salt_that_the_router_computes(
    server: Any, run: Beside, keys: Keys, where: tuple[str, str, str]
) -> None:
    async with target(server(), run, keys, where) as tried:
        await tried.cached("victim")
        scope = Scope("", keys.salts.of("t", ""))
        expected = set(array("Q", local_hashes(array("I", PROMPT).tobytes(), BLOCK, scope, [])))
        await until(lambda: expected <= tried.reported())


async def test_an_engine_that_is_not_known_to_separate_caches_gets_no_isolated_tenant(
    keys: Keys, where: tuple[str, str, str]
) -> None:
    namespace, etcd_endpoint, nats_url = where
    server = vllm()
    async with (
        running_system(nats_url, etcd_endpoint, namespace, **keys.options()) as system,
        server.started(model=MODEL, enable_prompt_tokens_details=True) as engine,
        running(
            WorkerConfig(
                component=ComponentName(namespace, "workers"),
                model=MODEL,
                block_size=BLOCK,
                worker_id=1,
                etcd=etcd_endpoint,
                nats=nats_url,
                openai_endpoint=server.url,
                ranks={0: 1000},
            )
        ),
        aiohttp.ClientSession() as http,
    ):
        await system.until_candidate(1)
        tried = Target(system, engine, keys, http, None)
        status, answer = await tried.complete("victim")
        assert status == 403
        assert "separates caches by salt" in answer["error"]["message"]
        assert await tried.cached("attacker") == 0
