"""Traffic that passed a Frontend can be simulated, and replayed, from what it recorded of it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import aiohttp
import pytest
from kvrouter.devtools.traces.reader import TraceRequest, read_trace
from kvrouter.frontend.settings import FrontendSettings
from kvrouter.runtime.config.settings import load
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.worker_pb2 import StopConditions

from ....waiting import until
from ..gateway import MODEL, request, running_system

SECRET = 77_123_456
PREAMBLE = [SECRET] * 16 + [SECRET + 1] * 16
# Two blocks in common, then one of each question's own, then a tail.
PROMPTS = [PREAMBLE + [question] * 16 + [7] * 5 for question in (1, 2, 1)]


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def shape(requests: Sequence[TraceRequest]) -> list[tuple[int, int, list[int]]]:
    """Lengths, and the requests' blocks numbered in order of appearance: equal where the same is shared."""
    order: dict[int, int] = {}
    return [
        (r.input_length, r.output_length, [order.setdefault(piece, len(order)) for piece in r.pieces]) for r in requests
    ]


async def kvrouter(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrouter.cli.main", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    return said.decode()


@pytest.mark.full
@pytest.mark.timeout(120)
async def test_a_recording_is_simulated_and_replayed(
    tmp_path: Path, nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    path = tmp_path / "traffic.jsonl"
    async with running_system(nats_url, etcd_endpoint, namespace, record=str(path)) as system:
        await system.start_worker(1)
        for number, prompt in enumerate(PROMPTS[:2]):
            stop = StopConditions(max_tokens=4 + number, ignore_eos=True)
            async for _ in system.client.generate(request(prompt, stop_conditions=stop), deadline=Deadline.after(30)):
                pass
        body = {"model": MODEL, "prompt": PROMPTS[2], "max_tokens": 6, "ignore_eos": True}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"http://{system.http}/v1/completions", json=body) as answer,
        ):
            assert answer.status == 200
        await until(lambda: len(lines(path)) == 3)
        recorded = read_trace(path)
        assert shape(recorded) == [(53, 4, [0, 1, 2, 3]), (53, 5, [0, 1, 4, 5]), (53, 6, [0, 1, 2, 6])]
        assert str(SECRET) not in path.read_text()

        results = tmp_path / "statistics.json"
        await kvrouter("simulate", str(path), "--workers", "1", "--json", str(results))
        (run,) = json.loads(results.read_text())["runs"]
        assert run["statistics"]["requests"] == 3
        assert run["statistics"]["reuse"] == pytest.approx((32 + 48) / (3 * 53))

        await kvrouter("replay", str(path), "--target", system.target, "--load", "10")
        await until(lambda: len(lines(path)) == 6)
        assert shape(read_trace(path)[3:]) == shape(recorded)


async def test_a_request_is_recorded_with_its_output_and_not_without_output(
    tmp_path: Path, nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    path = tmp_path / "traffic.jsonl"
    async with running_system(nats_url, etcd_endpoint, namespace, record=str(path)) as system:
        await system.start_worker(1, clock_factor=2.0)
        with pytest.raises(KvRouterError):
            async for _ in system.client.generate(request(model="no-such"), deadline=Deadline.after(30)):
                pass
        long = request(PROMPTS[0], stop_conditions=StopConditions(max_tokens=3000, ignore_eos=True))
        async with aclosing(system.client.generate(long, deadline=Deadline.after(30))) as pieces:
            await anext(pieces)
        await system.until_idle()
    (only,) = read_trace(path)
    assert only.input_length == 53
    assert 1 <= only.output_length < 3000


async def test_a_full_disk_costs_records_and_no_request(nats_url: str, etcd_endpoint: str, namespace: str) -> None:
    async with running_system(nats_url, etcd_endpoint, namespace, record="/dev/full") as system:
        await system.start_worker(1)
        for _ in range(2):
            assert await system.generated() == 4

        def failed() -> float:
            name = "kvrouter_frontend_recorded_requests_total"
            return system.runtime.registry.get_sample_value(name, {"outcome": "failed"}) or 0.0

        await until(lambda: failed() == 2)


@pytest.mark.parametrize("where", ["/", "/no/such/folder/r.jsonl"])
def test_a_file_that_cannot_be_is_refused_at_start(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load(FrontendSettings, ["--record", where], prog="kvrouter-frontend")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "--record" in said
    assert said.count("\n") == 1
