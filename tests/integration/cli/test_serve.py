"""`kvrouter serve`: all services in one process do what they do apart."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from kvrouter.cli.main import main
from kvrouter.devtools.replay.frontend_target import ReplayOptions
from kvrouter.devtools.replay.sequential import sequential_replay
from kvrouter.devtools.replay.statistics import expected_cached_tokens
from kvrouter.devtools.system.ports import free_port
from kvrouter.devtools.system.processes import Command, ManagedProcess
from kvrouter.devtools.system.stack import until_serving
from kvrouter.devtools.traces.reader import TraceRequest
from kvrouter.frontend.access.key_file import KeyFile, write_key_file
from kvrouter.mocker.settings import MockerSettings
from kvrouter.mocker.standalone import serving_alone
from kvrouter.runtime.contracts import Frontend, Indexer
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.runtime.telemetry.metrics import new_registry
from kvrouter.v1 import frontend_pb2, indexer_pb2
from kvrouter.v1.common_pb2 import Component
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.frontend_pb2 import FrontendServiceGetPotentialLoadsRequest

from ...kube_api_server import as_with_kubectl, serving_kube_api

pytestmark = pytest.mark.timeout(180)

_ROOT = Path(__file__).parents[3]
_SERVICES = {"indexer": "IndexerService", "scheduler": "SchedulerService", "frontend": "FrontendService"}


def module(name: str, service: str, *arguments: str) -> Command:
    return Command(name, (sys.executable, "-m", f"kvrouter.{service}", *arguments), dict(os.environ))


@asynccontextmanager
async def processes(logs: Path, *commands: Command) -> AsyncIterator[list[ManagedProcess]]:
    async with AsyncExitStack() as stack:
        started = []
        for command in commands:
            process = await ManagedProcess.start(command, logs)
            stack.push_async_callback(process.stop, 20)
            started.append(process)
        yield started


@pytest.mark.parametrize("split", [("indexer,scheduler,frontend",), ("indexer,scheduler", "frontend")])
async def test_services_together_answer_as_services_apart(
    tmp_path: Path, nats_url: str, etcd_endpoint: str, namespace: str, split: tuple[str, ...]
) -> None:
    where = ("--namespace", namespace, "--nats", nats_url, "--etcd", etcd_endpoint, "--drain-seconds", "1")
    addresses = {roles: f"127.0.0.1:{free_port()}" for roles in split}
    commands = [
        module(
            f"serve-{place}",
            "cli.main",
            *("serve", "--roles", roles, *where, "--bind", addresses[roles]),
            *(("--port", "0") if "frontend" in roles else ()),
        )
        for place, roles in enumerate(split)
    ]
    workers = [
        module(f"worker-{number}", "mocker", *where, "--worker-id", str(number), "--clock-factor", "50")
        for number in (1, 2)
    ]
    requests = [
        TraceRequest(index, 0.0, 1200, 4, pieces)
        for index, pieces in enumerate([(1, 2, 3), (1, 2, 4), (1, 2, 3), (9, 8, 7)])
    ]
    async with (
        processes(tmp_path, *commands, *workers) as started,
        open_channel(addresses[split[-1]]) as to_frontend,
        open_channel(addresses[split[0]]) as to_indexer,
    ):
        async with asyncio.timeout(60):
            for roles, address in addresses.items():
                for role in roles.split(","):
                    await until_serving(address, f"kvrouter.v1.{_SERVICES[role]}")
        frontend = cast("Frontend", remote(frontend_pb2.DESCRIPTOR.services_by_name["FrontendService"], to_frontend))
        indexer = cast("Indexer", remote(indexer_pb2.DESCRIPTOR.services_by_name["IndexerService"], to_indexer))
        await until_routable(frontend)
        component = Component(namespace=namespace, name="workers")
        async with sequential_replay(frontend, indexer, component) as sequential:
            records = await sequential.play(requests, ReplayOptions(model="mock-model", id_prefix="serve"))
        cached = [record.cached_tokens for record in records]
        assert cached == [0, 1024, 1184, 0]
        assert cached == [
            expected_cached_tokens(record.predicted_overlap_blocks or 0, record.prompt_tokens, 16) for record in records
        ]
        for process in started[: len(split)]:
            assert await process.stop(20) == 0, process.last_lines()


async def test_every_metric_is_documented_and_exposed(
    tmp_path: Path, nats_url: str, etcd_endpoint: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (_ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE))
    named = {
        name
        for pattern in ("README.md", "docs/**/*.md", "services/**/README.md")
        for document in _ROOT.glob(pattern)
        for name in re.findall(r"\bkvrouter_(?!publisher\b)[a-z_]*[a-z]\b", document.read_text(encoding="utf-8"))
    }
    where = ("--namespace", namespace, "--nats", nats_url, "--etcd", etcd_endpoint)
    static = ("--static-workers", "127.0.0.1:1", "--static-model", "m", "--router-mode", "random")
    ops = [f"127.0.0.1:{free_port()}" for _ in range(7)]
    record = ("--record", str(tmp_path / "traffic.jsonl"))
    ports = ("--port", "0", "--endpoint-picker-bind", "127.0.0.1:0", "--query-bind", "127.0.0.1:0")
    every = (*where, "--replica-sync", *ports, "--http-bind", ops[0], *record)
    write_key_file(tmp_path / "keys.json", KeyFile())
    signing = ("--jwt-keys", "http://127.0.0.1:1/", "--jwt-issuer", "i", "--jwt-audience", "a")
    keys = ("--api-keys", str(tmp_path / "keys.json"), *signing)
    without_etcd = ("--roles", "frontend,scheduler", *static, *keys, "--port", "0", "--http-bind", ops[1])
    commands = [
        module(f"serve-{place}", "cli.main", "serve", *some) for place, some in enumerate((every, without_etcd))
    ]
    commands.append(module("mocker", "mocker", *where, "--role", "prefill", "--http-bind", ops[2]))
    engine = ("--kv-events", f"tcp://127.0.0.1:{free_port()}", "--model", "m", "--block-size", "4")
    relay = (*where, "--component", "relayed", *engine, "--http-bind", ops[3])
    commands.append(module("relay", "cli.main", "relay", *relay))
    beside = ("--component", "beside", "--engine", "http://127.0.0.1:1", "--http-bind", ops[5])
    commands.append(module("sidecar", "cli.main", "sidecar", *where, *beside))
    several = (*where, "--processes", "2", "--port", "0", "--http-bind", ops[4])
    commands.append(module("frontends", "frontend", *several))
    async with serving_kube_api() as kube, AsyncExitStack() as stack:
        as_with_kubectl(monkeypatch, tmp_path, kube)
        pods = ("--component", "pods", "--engine-pods", "app=vllm", "--http-bind", ops[6])
        commands.append(module("pods", "cli.main", "sidecar", *where, *pods))
        await stack.enter_async_context(processes(tmp_path, *commands))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        exposed: set[str] = set()
        with suppress(TimeoutError):
            async with asyncio.timeout(120):
                while not listed <= exposed:  # A process answers before all of its parts run.
                    for address in ops:
                        exposed |= await metric_names(session, address)
    assert listed == {
        name for name in exposed if name.startswith(("kvrouter_", "gen_ai_")) and not name.endswith("_created")
    }
    assert named <= listed, sorted(named - listed)


async def metric_names(session: aiohttp.ClientSession, address: str) -> set[str]:
    """Metrics of a process, once it answers."""
    async with asyncio.timeout(60):
        while True:
            with suppress(aiohttp.ClientConnectionError):
                async with session.get(f"http://{address}/metrics") as answer:
                    return set(re.findall(r"^# HELP (\S+) \S", await answer.text(), re.MULTILINE))
            await asyncio.sleep(0.05)


async def until_routable(frontend: Frontend) -> None:
    request = FrontendServiceGetPotentialLoadsRequest()
    request.request.model = "mock-model"
    request.request.token_ids.ids.extend(range(16))
    async with asyncio.timeout(60):
        while True:
            with suppress(KvRouterError):
                if len((await frontend.get_potential_loads(request, deadline=Deadline.after(5))).loads) == 2:
                    return
            await asyncio.sleep(0.05)


async def test_the_page_of_a_process_with_listed_workers_shows_its_own_scheduler(tmp_path: Path) -> None:
    bind, http, port = (f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}", str(free_port()))
    mocker = MockerSettings(worker_id=3, bind="127.0.0.1:0", clock_factor=50.0)
    async with serving_alone(mocker, new_registry()) as worker, aiohttp.ClientSession() as session:
        listed = ("--static-workers", worker, "--static-model", "mock-model", "--no-kv-events", "--router-mode", "kv")
        roles = ("serve", "--roles", "scheduler,frontend", "--bind", bind, "--http-bind", http)
        listens = ("--host", "0.0.0.0", "--port", port)  # noqa: S104
        async with processes(tmp_path, module("serve", "cli.main", *roles, *listens, *listed)):
            async with asyncio.timeout(60):
                await until_serving(bind, "kvrouter.v1.FrontendService")
                while not is_well(shown := await overview(session, port)):
                    await asyncio.sleep(0.05)
            assert [each["rank"] for each in shown["components"][0]["ranks"]] == ["3:0"]
            said = (tmp_path / "serve.log").read_text(encoding="utf-8")
            # Browsers open no wildcard address.
            assert f"HTTP API  http://127.0.0.1:{port}\nWeb page  http://127.0.0.1:{port}/ui/\n" in said
            assert {each["kind"]: each["state"] for each in shown["services"]} == {
                "Scheduler": "ready",
                "Frontend": "ready",
            }
            assert all(each["name"] for each in shown["services"])
            assert shown["problems"] == []

            chat = {"model": "mock-model", "prompt": list(range(64)), "max_tokens": 2}
            async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=chat) as answer:
                assert answer.status == 200, await answer.text()
            async with asyncio.timeout(60):
                while not (shown := await overview(session, port))["decisions"]:
                    await asyncio.sleep(0.05)
            (latest,) = shown["decisions"]
            path = f"/ui/data/decisions/{latest['id']}"
            async with session.get(
                f"http://127.0.0.1:{port}{path}", params={"scheduler": latest["scheduler"]}
            ) as answer:
                assert [each["rank"] for each in (await answer.json())["candidates"]] == ["3:0"]


def is_well(shown: dict[str, Any]) -> bool:
    """Returns whether the page knows a rank, and everything is ready."""
    ready = all(each["state"] == "ready" for each in shown["services"])
    return bool(shown["components"][0]["ranks"]) and ready and not shown["problems"]


async def overview(session: aiohttp.ClientSession, port: str) -> dict[str, Any]:
    async with session.get(f"http://127.0.0.1:{port}/ui/data/overview") as answer:
        assert answer.status == 200
        found: dict[str, Any] = await answer.json()
        return found


LISTED = ("--static-workers", "127.0.0.1:1", "--static-model", "m")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--roles", "wat"), "role 'wat' is unknown"),
        (("--roles", "indexer", "--router-mode", "kv"), "--router-mode"),
        (("--roles", "scheduler", "--router-temperature", "hot"), "--router-temperature"),
        (("--roles", "frontend", *LISTED), "--static-schedulers"),
        (("--roles", "frontend", "--processes", "2"), "start kvrouter-frontend on its own"),
        (("--roles", "frontend,scheduler", *LISTED), "mode forecast queries an Indexer"),
        (("--roles", "indexer,scheduler", "--router-mode", "random", *LISTED), "leave the role indexer out"),
    ],
)
def test_wrong_roles_and_options_are_one_line_and_status_2(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvrouter", "serve", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capfd.readouterr().err
    assert words in said
    assert said.count("\n") == 1
