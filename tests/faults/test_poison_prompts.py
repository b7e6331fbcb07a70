"""A prompt that kills every worker which runs it: it costs two workers, however often a client sends it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence

import pytest
from kvrouter.devtools.system.ports import free_ports
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import TokenIds
from kvrouter.v1.errors import KvRouterError, PoisonPrompt
from kvrouter.v1.errors_pb2 import ErrorReason
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest
from kvrouter.v1.worker_pb2 import StopConditions

from .processes import MODEL, PATIENCE_SECONDS, Processes, cancelled, services_ready, start_services, streamed
from .rig import FULL, process_state

WORKERS = 12 if FULL else 4
FRONTENDS = 2
RETRIED_SECONDS = 60.0 if FULL else 2.0
POISON = 31_999
PROMPT = [*range(40), POISON]
EFFECTS = [
    "die",
    pytest.param("die-after-output", marks=pytest.mark.full),
    pytest.param("hang", marks=pytest.mark.full),
]


async def started(
    processes: Processes, effect: str, *, frontend: Sequence[str] = (), has_sidecar: bool = False
) -> None:
    await start_services(processes, schedulers=1, frontends=FRONTENDS, frontend=frontend)
    lease = ("--lease-seconds", "2") if effect == "hang" else ()
    ports = free_ports(WORKERS)
    for number, port in enumerate(ports):
        options = ("--poison-token", str(POISON), "--poison-effect", effect)
        if has_sidecar:
            options += ("--openai", "--model", MODEL, "--bind", f"127.0.0.1:{port}")
        else:
            options += ("--worker-id", str(number + 1), *lease)
        await processes.start("mocker", f"mocker-{number}", *options)
    if has_sidecar:
        engines = (each for port in ports for each in ("--engine", f"http://127.0.0.1:{port}"))
        await processes.start("sidecar", "sidecar", *engines, "--worker-id", "1", *("--kv-events", "none") * WORKERS)
    await services_ready(processes, schedulers=1, frontends=FRONTENDS, workers=WORKERS)


async def send(processes: Processes, number: int, *, migration_limit: int | None = None) -> KvRouterError:
    """Sends the poison prompt to one of the Frontends, and returns the error."""
    request = FrontendServiceGenerateRequest(
        model=MODEL,
        token_ids=TokenIds(ids=PROMPT),
        stop_conditions=StopConditions(max_tokens=50),
        migration_limit=migration_limit,
    )
    frontend = processes.frontend(f"frontend-{number % FRONTENDS}")
    try:
        async for _ in frontend.generate(request, deadline=Deadline.after(PATIENCE_SECONDS)):
            pass
    except KvRouterError as error:
        return error
    raise AssertionError("the poison prompt was served")


def dead_or_hung(processes: Processes) -> list[str]:
    """Returns the workers whose process has ended or is stopped."""
    workers = {name: process for name, process in processes.running.items() if name.startswith("mocker")}
    return [name for name, each in workers.items() if each.returncode is not None or process_state(each.pid) in "TZX"]


async def two_are_dead_or_hung(processes: Processes) -> None:
    """Waits for the end of processes whose connections have ended, and for one that is slow to read the prompt."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(dead_or_hung(processes)) < 2:
            await asyncio.sleep(0.02)
    assert len(dead_or_hung(processes)) == 2


@pytest.mark.parametrize("effect", EFFECTS)
async def test_a_client_that_retries_a_poison_prompt_costs_two_workers(processes: Processes, effect: str) -> None:
    await started(processes, effect, frontend=("--worker-probe-seconds", "0.2"))
    until = time.monotonic() + RETRIED_SECONDS
    errors = [await send(processes, 0, migration_limit=16)]
    while time.monotonic() < until:
        errors.append(await send(processes, len(errors), migration_limit=16))
        await asyncio.sleep(0.05)
    assert all(isinstance(error, PoisonPrompt) for error in errors), errors
    assert all(error.info.reason == ErrorReason.ERROR_REASON_POISON_PROMPT for error in errors)
    assert not any(error.info.HasField("retry_after_ms") for error in errors), "nothing invites a retry"
    await two_are_dead_or_hung(processes)
    assert await streamed(processes.frontend("frontend-0"), 1, 5) == 5, "other prompts are served"


@pytest.mark.parametrize("effect", ["die", pytest.param("die-after-output", marks=pytest.mark.full)])
async def test_engines_beside_a_sidecar_that_die_are_deaths(processes: Processes, effect: str) -> None:
    """The sidecar, which is the worker, lives on."""
    await started(processes, effect, has_sidecar=True)
    errors = [await send(processes, number, migration_limit=16) for number in range(10)]
    assert all(isinstance(error, PoisonPrompt) for error in errors), errors
    await two_are_dead_or_hung(processes)


@pytest.mark.full
async def test_a_worker_that_is_slow_to_read_the_prompt_is_one_of_the_two(processes: Processes) -> None:
    """The request leaves it with the prompt unread, and kills another one; then it reads the prompt and dies too."""
    await started(processes, "die", frontend=("--worker-probe-seconds", "0.2"))
    frontend = processes.frontend("frontend-0")
    # So the first worker gets the prompt.
    busy = [
        asyncio.create_task(streamed(frontend, 10 * worker + number, 2000, worker_id=worker))
        for worker in range(2, WORKERS + 1)
        for number in range(4)
    ]
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await processes.booked("scheduler-0") < len(busy):
            await asyncio.sleep(0.02)
        processes.signal("mocker-0", signal.SIGSTOP)
        sending = asyncio.create_task(send(processes, 0, migration_limit=16))
        while len(dead_or_hung(processes)) < 2:
            await asyncio.sleep(0.02)
        processes.signal("mocker-0", signal.SIGCONT)
        assert isinstance(await sending, PoisonPrompt)
        await processes.running["mocker-0"].wait()
    await cancelled(busy)
    assert len(dead_or_hung(processes)) == 2


@pytest.mark.full
async def test_clients_that_follow_retry_info_cost_two_workers(processes: Processes) -> None:
    """Each request ends with its worker, and invites a retry: the second one learns of the first one's death."""
    await started(processes, "die-after-output")
    first = await send(processes, 0, migration_limit=0)
    assert first.info.reason == ErrorReason.ERROR_REASON_WORKER_LOST
    assert first.info.HasField("retry_after_ms")
    errors = [await send(processes, number, migration_limit=0) for number in range(1, 20)]
    assert all(isinstance(error, PoisonPrompt) for error in errors), errors
    await two_are_dead_or_hung(processes)
