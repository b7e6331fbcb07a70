"""The client against a system of separate processes."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import grpc
import pytest
import pytest_asyncio
from kvrouter.client import (
    AllBusy,
    BadRequest,
    Client,
    ClientClosed,
    DeadlineExceeded,
    FinishReason,
    KvRouterError,
    NotConnected,
    PromptTooLong,
    RouterConfigOverride,
    SyncClient,
    UnknownModel,
    UnknownWorker,
    WrongEventLoop,
)
from kvrouter.devtools.system.ports import free_port
from kvrouter.devtools.system.stack import Stack

from ...waiting import until

MODEL = "mock-model"
ENDLESS = 50_000

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def client(stack: Stack) -> AsyncIterator[Client]:
    """A client of a system that has freed the bookings of the tests before."""
    async with Client(stack.frontend, model=MODEL) as client:
        await until_idle(client)
        yield client


@pytest.fixture
def prompt() -> list[int]:
    """A prompt of 12 full blocks that no other test has."""
    return random.SystemRandom().choices(range(1 << 16), k=200)


async def active_requests(client: Client) -> int:
    return sum(load["active_requests"] for load in await client.get_potential_loads([1]))


async def until_idle(client: Client) -> None:
    """Waits until no booking is left. A Scheduler learns of the end of a request after its client."""

    async def idle() -> bool:
        return await active_requests(client) == 0

    await until(idle)


async def test_output_arrives_piece_by_piece(client: Client, prompt: list[int]) -> None:
    generation = await client.generate(prompt, stop_conditions={"max_tokens": 5})
    assert generation.routing.prompt_blocks == 12
    assert generation.routing.mode == "kv"
    pieces = [piece async for piece in generation]
    assert sum(len(piece.token_ids) for piece in pieces) == 5
    assert pieces[0].cached_tokens == 0
    assert pieces[-1].finish_reason is FinishReason.LENGTH
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)


async def test_a_prompt_goes_to_the_worker_that_has_it(client: Client, prompt: list[int]) -> None:
    first = await client.generate(prompt)
    assert len(await first.tokens()) == 16
    holder = first.routing.worker_id

    async def indexed_and_idle() -> bool:
        # Bookings that are not freed yet, also those of the test before, would make the holder cost more.
        is_indexed = await client.find_matches_for_request(prompt) == {holder: 12}
        return is_indexed and not await active_requests(client)

    await until(indexed_and_idle)
    second = await client.generate(memoryview(b"".join(token.to_bytes(4, "little") for token in prompt)))
    assert (second.routing.worker_id, second.routing.overlap_blocks) == (holder, 12)
    worker_id, dp_rank, overlap_blocks = await client.best_worker(prompt)
    assert (worker_id, dp_rank, overlap_blocks) == (holder, 0, 12)
    by_worker = {load["worker_id"]: load for load in await client.get_potential_loads(prompt)}
    assert by_worker.pop(holder)["overlap_blocks"] == 12
    assert [load["overlap_blocks"] for load in by_worker.values()] == [0]
    await second.aclose()


async def test_a_request_may_name_its_worker(client: Client, prompt: list[int]) -> None:
    for worker_id in (1, 2):
        async with await client.direct(worker_id, prompt, dp_rank=0) as generation:
            assert (generation.routing.worker_id, generation.routing.mode) == (worker_id, "direct")
        async with await client.generate(prompt, worker_id=worker_id) as generation:
            assert generation.routing.worker_id == worker_id
        best = await client.best_worker(prompt, constraints={"excluded_worker_ids": [worker_id]})
        assert best.worker_id == 3 - worker_id


async def test_a_request_may_choose_its_policy(client: Client, prompt: list[int]) -> None:
    chosen = set()
    for _ in range(2):
        async with await client.round_robin(prompt) as generation:
            chosen.add((generation.routing.worker_id, generation.routing.mode))
    assert chosen == {(1, "round-robin"), (2, "round-robin")}
    async with await client.random(prompt, router_config_override={"overlap_score_weight": 1.0}) as generation:
        assert generation.routing.mode == "random"
        assert generation.routing.ignored_overrides == ("overlap_score_weight",)
    async with await client.generate(prompt, router_config_override={"router_temperature": 0.5}) as generation:
        assert generation.routing.ignored_overrides == ()


async def test_text_goes_in_and_comes_out(client: Client) -> None:
    generation = await client.generate(prompt_text="Hello, world", return_text=True, stop_conditions={"max_tokens": 8})
    assert "".join([piece.text async for piece in generation])


async def test_a_closed_generation_is_aborted(client: Client, prompt: list[int]) -> None:
    generation = await client.generate(prompt, stop_conditions={"max_tokens": ENDLESS, "ignore_eos": True})
    assert await active_requests(client) == 1
    await generation.aclose()
    assert [piece async for piece in generation] == []
    await until_idle(client)


async def test_a_booking_counts_until_it_is_freed(client: Client, prompt: list[int]) -> None:
    await client.best_worker(prompt)
    assert await active_requests(client) == 0
    booked = await client.best_worker(prompt, request_id="mine")
    again = await client.best_worker(prompt, request_id="mine")
    assert (again.worker_id, again.decision_id) == (booked.worker_id, booked.decision_id)
    assert await active_requests(client) == 1
    before = {load["worker_id"]: load["potential_prefill_tokens"] for load in await client.get_potential_loads(prompt)}
    assert await client.mark_prefill_complete("mine")
    after = {load["worker_id"]: load["potential_prefill_tokens"] for load in await client.get_potential_loads(prompt)}
    assert after[booked.worker_id] == before[booked.worker_id] - 200
    assert await client.free("mine")
    assert await active_requests(client) == 0
    assert not await client.free("mine")
    assert not await client.mark_prefill_complete("mine")


async def test_a_request_id_may_be_used_again_and_by_others(stack: Stack, client: Client, prompt: list[int]) -> None:
    async with Client(stack.frontend, model=MODEL) as other:
        await client.best_worker(prompt, request_id="same")
        await other.best_worker(prompt[:100], request_id="same")
        assert await active_requests(client) == 2
        assert await client.free("same")
        await client.best_worker(prompt, request_id="same")
        assert await active_requests(client) == 2
        assert await client.free("same")
    # The other one released its booking when its context was left.
    await until_idle(client)


async def test_the_index_is_dumped_as_events(client: Client, prompt: list[int]) -> None:
    generation = await client.generate(prompt)
    await generation.tokens()

    async def indexed() -> bool:
        return bool(await client.find_matches_for_request(prompt))

    await until(indexed)
    events = json.loads(await client.dump_events())
    assert {event["worker_id"] for event in events} <= {1, 2}
    stored = [event["event"]["data"]["stored"] for event in events]
    hashes = {block["block_hash"] for each in stored for block in each["blocks"]}
    assert len(hashes) >= 12
    assert {each["parent_hash"] for each in stored} - {None} <= hashes


async def test_models_are_listed(client: Client) -> None:
    (model,) = await client.list_models()
    assert (model.name, model.component, model.block_size, model.workers) == (MODEL, "kvrouter/workers", 16, 2)


async def test_errors_have_what_the_server_says(client: Client, prompt: list[int]) -> None:
    with pytest.raises(UnknownModel) as unknown:
        await client.generate(prompt, "no-such-model")
    assert (unknown.value.code, unknown.value.reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL")
    assert unknown.value.known_values == (MODEL,)
    assert unknown.value.retry_after is None
    with pytest.raises(UnknownWorker) as absent:
        await client.direct(99, prompt)
    assert absent.value.known_values == ("1", "2")
    with pytest.raises(PromptTooLong):
        await client.generate([1] * 300_000)
    with pytest.raises(BadRequest) as mode:
        await client.best_worker(prompt, {"mode": "no-such-mode"})
    assert mode.value.field == "overrides.mode"
    with pytest.raises(BadRequest) as huge:
        await client.generate(prompt, stop_conditions={"max_tokens": 1 << 30})
    assert huge.value.field == "stop_conditions.max_tokens"
    with pytest.raises(DeadlineExceeded):
        await client.generate(prompt, timeout=1e-6)
    booked = await client.best_worker(prompt, request_id="busy")
    override = RouterConfigOverride(active_decode_blocks_threshold=0.0)
    with pytest.raises(AllBusy) as busy:
        await client.generate(prompt, worker_id=booked.worker_id, router_config_override=override)
    assert busy.value.retry_after is not None
    assert busy.value.retry_after > 0
    assert await client.free("busy")


async def test_a_failed_booking_leaves_nothing(client: Client, prompt: list[int]) -> None:
    with pytest.raises(KvRouterError):
        await client.best_worker(prompt, request_id="failed", constraints={"worker_id": 99})
    assert not await client.free("failed")
    waiting = asyncio.create_task(client.best_worker(prompt, request_id="cancelled"))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    await until_idle(client)


async def test_another_frontend_is_used_if_one_cannot_be_reached(stack: Stack, prompt: list[int]) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    async with Client([nobody, stack.frontend], model=MODEL) as client:
        assert len(await (await client.generate(prompt)).tokens()) == 16
        assert await client.list_models()
    async with Client(nobody, model=MODEL, reconnect_seconds=0.2) as client:
        with pytest.raises(NotConnected) as lost:
            await client.generate(prompt)
        assert lost.value.retry_elsewhere
        with pytest.raises(NotConnected):
            await client.best_worker(prompt, request_id="never")


async def test_a_client_outlives_its_frontend_and_keeps_its_bookings(stack: Stack, prompt: list[int]) -> None:
    async with Client(stack.frontend, model=MODEL, reconnect_seconds=60) as client:
        await client.best_worker(prompt, request_id="kept")
        generation = await client.generate(prompt, stop_conditions={"max_tokens": ENDLESS, "ignore_eos": True})
        process = stack.processes["frontend"]
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(NotConnected):
            await generation.tokens()
        async with aclosing(await client.generate(prompt)) as again:
            assert again.routing.prompt_blocks == 12
        assert stack.processes["frontend"] is not process

        async def only_this_counts() -> bool:
            # It is made again if the Frontend was away for longer than a Scheduler keeps a silent session.
            return await active_requests(client) == 1

        await until(only_this_counts)
        assert await client.free("kept")


@pytest.mark.full
async def test_bookings_are_made_again_at_a_scheduler_that_was_killed(stack: Stack, prompt: list[int]) -> None:
    async with Client(stack.frontend, model=MODEL, reconnect_seconds=60) as client:
        chosen = [await client.best_worker(prompt, request_id=f"request {number}") for number in range(3)]
        assert await client.mark_prefill_complete("request 0")
        process = stack.processes["scheduler"]

        async def only_these_count() -> bool:
            try:
                return await active_requests(client) == 3
            except KvRouterError:
                return False

        await until(only_these_count)
        os.kill(process.pid, signal.SIGKILL)

        async def another_one_has_them() -> bool:
            return stack.processes["scheduler"] is not process and await only_these_count()

        await until(another_one_has_them)
        again = [await client.best_worker(prompt, request_id=f"request {number}") for number in range(3)]
        assert [each.worker_id for each in again] == [each.worker_id for each in chosen]
        assert await client.mark_prefill_complete("request 1")
        assert [await client.free(f"request {number}") for number in range(3)] == [True] * 3


async def test_a_client_is_used_in_its_context_and_loop_only(stack: Stack, prompt: list[int]) -> None:
    client = Client(stack.frontend, model=MODEL)
    with pytest.raises(ClientClosed, match="not entered"):
        await client.generate(prompt)
    async with client:
        with pytest.raises(WrongEventLoop):
            await asyncio.to_thread(lambda: asyncio.run(client.list_models()))
        generation = await client.generate(prompt, stop_conditions={"max_tokens": ENDLESS, "ignore_eos": True})
    with pytest.raises(NotConnected, match="closed"):
        await generation.tokens()
    with pytest.raises(ClientClosed, match="left"):
        await client.list_models()
    with pytest.raises(ClientClosed):
        async with client:
            pass


async def test_the_blocking_client_has_the_same_calls(stack: Stack, prompt: list[int]) -> None:
    def use() -> None:
        with SyncClient(stack.frontend, model=MODEL) as client:
            with client.generate(prompt, stop_conditions={"max_tokens": 5}) as generation:
                assert sum(len(piece.token_ids) for piece in generation) == 5
            assert len(client.random(prompt).tokens()) == 16
            assert len(client.round_robin(prompt).tokens()) == 16
            assert client.direct(2, prompt).routing.worker_id == 2
            assert client.best_worker(prompt, request_id="sync").prompt_blocks == 12
            assert client.mark_prefill_complete("sync")
            assert client.free("sync")
            assert len(client.get_potential_loads(prompt)) == 2
            assert client.find_matches_for_request(prompt).keys() <= {1, 2}
            assert json.loads(client.dump_events())
            assert client.list_models()[0].name == MODEL
            with pytest.raises(UnknownModel):
                client.generate(prompt, "no-such-model")
            generation = client.generate(prompt, stop_conditions={"max_tokens": ENDLESS, "ignore_eos": True})
            generation.close()
            assert list(generation) == []
        with pytest.raises(ClientClosed):
            client.list_models()

    await asyncio.to_thread(use)


async def test_threads_share_a_blocking_client(stack: Stack, prompt: list[int]) -> None:
    def use() -> None:
        with SyncClient(stack.frontend, model=MODEL) as client, ThreadPoolExecutor(8) as threads:
            lengths = threads.map(lambda number: len(client.generate([number, *prompt]).tokens()), range(32))
            assert list(lengths) == [16] * 32

    await asyncio.to_thread(use)


async def test_a_blocking_client_that_is_closed_ends_the_calls_of_other_threads(
    stack: Stack, prompt: list[int]
) -> None:
    def use() -> None:
        with ThreadPoolExecutor(1) as threads:
            with SyncClient(stack.frontend, model=MODEL) as client:
                generation = client.generate(prompt, stop_conditions={"max_tokens": ENDLESS, "ignore_eos": True})
                reading = threads.submit(generation.tokens)
            assert isinstance(reading.exception(timeout=30), NotConnected | ClientClosed)

    await asyncio.to_thread(use)
