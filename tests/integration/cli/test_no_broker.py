"""`kvrouter serve --engine`: real KV events in one process, without etcd and NATS."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from kvrouter.devtools.system.ports import free_ports

from ...waiting import until
from ..frontend.access.keys import Keys
from ..sidecar.rig import BLOCK, EngineServer, sglang, vllm
from .no_broker import Answer, begun, command, serving

pytestmark = pytest.mark.timeout(180)

PROMPT = list(range(100, 100 + 8 * BLOCK + 1))
"""A prompt of eight whole blocks."""


def engine(kind: str) -> EngineServer:
    start = vllm if kind == "vllm" else sglang
    return start(enable_prompt_tokens_details=True)


@pytest.mark.parametrize("kind", ["vllm", pytest.param("sglang", marks=pytest.mark.full)])
async def test_a_prompt_sent_again_hits_the_cache_that_the_engine_reports(tmp_path: Path, kind: str) -> None:
    engines = [engine(kind), engine(kind)]
    async with AsyncExitStack() as stack:
        for each in engines:
            await stack.enter_async_context(each.started())
        system = await stack.enter_async_context(serving(tmp_path, *(each.url for each in engines)))
        await system.serving(2)
        assert await system.models() == ["m"]
        first = await system.ask(PROMPT)
        assert (first.status, first.overlap_blocks, first.cached_tokens) == (200, 0, 0)
        await system.settled(first.worker, 8)
        assert await system.ask(PROMPT) == Answer(200, first.worker, 8, 8 * BLOCK)
        stats = (await system.ranks())[int(first.worker.partition(":")[0])]
        assert stats.cursor.next_event_id > 0, "events were applied, not predictions"


async def test_what_an_engine_cached_before_is_replayed_at_the_start(tmp_path: Path) -> None:
    running = engine("vllm")
    async with running.started(), serving(tmp_path, running.url) as before:
        await before.serving(1)
        first = await before.ask(PROMPT)
        assert first.overlap_blocks == 0
        assert await before.process.stop(20) == 0, before.process.last_lines()
        async with serving(tmp_path, running.url, name="again") as after:
            await after.serving(1)
            await after.settled(first.worker, 8)
            assert (await after.ask(PROMPT)).overlap_blocks == 8


async def test_an_engine_that_restarts_is_taken_to_hold_nothing(tmp_path: Path) -> None:
    restarting = engine("vllm")
    async with AsyncExitStack() as stack:
        async with restarting.started():
            system = await stack.enter_async_context(serving(tmp_path, restarting.url))
            await system.serving(1)
            await system.ask(PROMPT)

            async def indexed() -> bool:
                return any(each.blocks >= 8 for each in (await system.ranks()).values())

            await until(indexed, 60)
        async with restarting.started():

            async def emptied() -> bool:
                return all(each.blocks < 8 for each in (await system.ranks()).values())

            async def answered() -> bool:
                nonlocal answer
                answer = await system.ask(PROMPT)
                return answer.status == 200

            await until(emptied, 60)
            answer = Answer(0, "", 0, 0)
            await until(answered, 60)
            assert (answer.overlap_blocks, answer.cached_tokens) == (0, 0)


@pytest.mark.full
async def test_an_engine_that_comes_back_with_another_block_size_is_served(tmp_path: Path) -> None:
    changing = engine("vllm")
    async with AsyncExitStack() as stack:
        async with changing.started():
            system = await stack.enter_async_context(serving(tmp_path, changing.url))
            await system.serving(1)
        async with changing.started(block_size=2 * BLOCK):

            async def reused() -> bool:
                answer = await system.ask(PROMPT)
                return answer.overlap_blocks == 4

            await until(reused, 60)


async def test_an_engine_without_events_is_predicted_and_named(tmp_path: Path) -> None:
    silent, talking = vllm(kv_events_config="", enable_prompt_tokens_details=True), engine("vllm")
    async with (
        silent.started(),
        talking.started(),
        serving(tmp_path, silent.url, talking.url) as system,
    ):
        await system.serving(1)
        await system.until_logged("sidecar.engine_without_events")
        assert "--kv-events-config" in system.process.log_file.read_text(), "the engine's option is named"
        workers: set[str] = set()
        for number in range(30):
            # Different prompts spread, at equal costs by chance; the same prompt goes where its first request went.
            prompt = [1000 * number + each for each in range(8 * BLOCK + 1)]
            first = await system.ask(prompt)
            workers.add(first.worker)

            async def follows(prompt: list[int] = prompt, first: Answer = first) -> bool:
                return await system.ask(prompt) == Answer(200, first.worker, 8, 8 * BLOCK)

            await until(follows, 60)
            if number >= 5 and len(workers) == 2:
                break
        assert len(workers) == 2


@pytest.mark.full
async def test_an_engine_that_starts_later_joins(tmp_path: Path) -> None:
    late = engine("vllm")
    async with serving(tmp_path, late.url) as system:
        await system.until_logged("sidecar.engine_not_ready")
        async with late.started():
            await system.serving(1)
            assert (await system.ask(PROMPT)).status == 200


async def test_engines_of_a_file_come_and_go(tmp_path: Path) -> None:
    one, two = engine("vllm"), engine("vllm")
    named = tmp_path / "engines"
    named.write_text(f"{one.url}\n")
    async with (
        one.started(clock_factor=1) as server,
        two.started(),
        serving(tmp_path, options=("--engines-file", str(named), "--drain-seconds", "60")) as system,
    ):
        await system.serving(1)
        first = (await system.ask(PROMPT)).worker
        await system.settled(first, 8)
        running = await begun(server, system.ask(PROMPT, max_tokens=200, ignore_eos=True))
        named.write_text(f"{two.url}  # instead\n")

        async def moved() -> bool:
            answer = await system.ask(PROMPT)
            return answer.status == 200 and answer.worker != first

        await until(moved, 60)
        assert await running == Answer(200, first, 8, 8 * BLOCK), "a running request is not ended"
        named.write_text(f"{one.url}\n{two.url}\n")

        async def both() -> bool:
            return sum(each.registered for each in (await system.ranks()).values()) == 2

        await until(both, 60)


@pytest.mark.full
async def test_an_operator_adds_drains_and_removes_engines(tmp_path: Path) -> None:
    one, two = engine("vllm"), engine("vllm")
    named = tmp_path / "engines"
    named.write_text(f"{one.url}\n")
    async with one.started(), two.started(), serving(tmp_path, options=("--engines-file", str(named))) as system:
        await system.serving(1)
        first = (await system.ask(PROMPT)).worker
        assert "joins" in await command(tmp_path, "engine", "add", two.url)
        await system.serving(2)
        assert "no request runs" in await command(tmp_path, "engine", "drain", one.url)
        assert {(await system.ask(PROMPT)).worker for _ in range(4)} & {first} == set(), "none goes to the drained one"
        assert "gets requests again" in await command(tmp_path, "undrain", first.partition(":")[0])
        assert "leaves" in await command(tmp_path, "engine", "remove", two.url)

        async def left() -> bool:
            return sum(each.registered for each in (await system.ranks()).values()) == 1

        await until(left, 60)
        assert (await system.ask(PROMPT)).worker == first


async def test_another_router_asks_with_the_key_of_an_administrator(tmp_path: Path) -> None:
    engine, address = vllm(), f"127.0.0.1:{free_ports(1)[0]}"
    keys = Keys(tmp_path / "keys.json")
    keys.add("client")
    keys.add("admin", role="admin")
    keys.write()
    options = ("--query-bind", address, "--api-keys", str(keys.path))
    async with engine.started(), serving(tmp_path, engine.url, options=options) as system:
        await system.ready()
        query = {"model": "m", "block_size": BLOCK, "token_ids": list(range(2 * BLOCK))}
        for key, status in (("", 401), (keys["client"], 403), (keys["admin"], 200)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            async with system.session.post(f"http://{address}/query", json=query, headers=headers) as response:
                assert response.status == status
