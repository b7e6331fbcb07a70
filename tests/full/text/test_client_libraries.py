"""Libraries over the OpenAI API do what their guides show, on a system as ``make up`` starts it."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kvrouter.devtools.system.stack import Stack, StackOptions, running_stack
from kvrouter.frontend.access.key_file import KeyEntry, KeyFile, new_key, write_key_file
from kvrouter.runtime.rpc import open_channel
from kvrouter.v1.common_pb2 import Component
from kvrouter.v1.scheduler_pb2 import DrainWorkerRequest
from kvrouter.v1.scheduler_pb2_grpc import SchedulerServiceStub

HERE = Path(__file__).parent
PACKAGES = {
    "instructor": ("instructor",),
    "langchain": ("langchain-openai",),
    "litellm": ("litellm", "mcp"),  # It imports mcp for requests with tools.
    "openai": ("openai",),
    "pydantic_ai": ("pydantic-ai-slim[openai]",),
}
GUIDES = ("instructor", "langchain", "litellm", "pydantic_ai")
ERRORS = ("langchain", "litellm", "openai", "pydantic_ai")
MODEL = "mock-model"
NO_REGISTRY = re.compile(
    r"No matching distribution|Temporary failure in name resolution|[Cc]onnection refused|ECONNREFUSED|ENOTFOUND"
    r"|EAI_AGAIN|ETIMEDOUT|ENETUNREACH|E404|ENOTCACHED|Network is unreachable"
)


async def run(*command: str, directory: Path, seconds: float = 120) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        *command, cwd=directory, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(seconds):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, output.decode()


async def install(*command: str, directory: Path) -> None:
    """Installs packages, or skips the test if there is no registry."""
    code, output = await run(*command, directory=directory, seconds=540)
    if code and NO_REGISTRY.search(output):
        pytest.skip("the client libraries: need a package registry")
    assert code == 0, output[-4000:]


@asynccontextmanager
async def system(directory: Path) -> AsyncIterator[Stack]:
    options = StackOptions(directory, directory, workers=2, has_text=True, clock=20, mean_output_tokens=20)
    async with running_stack(options) as stack:
        yield stack


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("environments")


async def python_with(library: str, environments: Path) -> str:
    """Returns the Python of an environment that has the library."""
    directory = environments / library
    python = str(directory / "bin" / "python")
    if not directory.exists():
        await install(sys.executable, "-m", "venv", library, directory=environments)
        await install(python, "-m", "pip", "install", "--quiet", "--upgrade", "pip", directory=environments)
        await install(python, "-m", "pip", "install", "--quiet", *PACKAGES[library], directory=environments)
    return python


@pytest.mark.timeout(900)
@pytest.mark.parametrize("library", GUIDES)
async def test_a_library_for_python(library: str, environments: Path, tmp_path: Path) -> None:
    python = await python_with(library, environments)
    async with system(tmp_path) as stack:
        check = (str(HERE / "python_libraries.py"), library, f"http://{stack.http}/v1", MODEL)
        code, output = await run(python, "-I", *check, directory=tmp_path)
    assert code == 0, output[-4000:]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("library", ERRORS)
async def test_a_library_raises_its_own_types(library: str, environments: Path, tmp_path: Path) -> None:
    python = await python_with(library, environments)
    keys = {name: new_key(name) for name in ("client", "slow")}
    limits = {"slow": 0.001}
    entries = [KeyEntry(id=name, hash=made[1], requests_per_second=limits.get(name)) for name, made in keys.items()]
    write_key_file(tmp_path / "keys.json", KeyFile(entries))
    key = keys["client"][0]
    options = StackOptions(
        *(tmp_path, tmp_path),
        workers=1,
        has_text=True,
        clock=20,
        blocks=64,
        mean_output_tokens=20,
        frontend_options=("--api-keys", str(tmp_path / "keys.json")),
        api_key=key,
    )
    cases = {"overflow": key, "unknown model": key, "invalid key": f"{key}x", "rate limit": keys["slow"][0]}
    failures = {}
    async with running_stack(options) as stack:
        for case, used in (*cases.items(), ("no worker", key)):
            if case == "no worker":
                await drain(stack)
            check = (str(HERE / "python_errors.py"), library, f"http://{stack.http}/v1", MODEL, case, used)
            code, output = await run(python, "-I", *check, directory=tmp_path)
            if code:
                failures[case] = output[-2000:]
    assert not failures, "\n".join(f"{case}: {output}" for case, output in failures.items())


async def drain(stack: Stack) -> None:
    """Drains the only worker, so that no request can be routed."""
    component = Component(namespace=stack.options.namespace, name=stack.options.component)
    async with open_channel(stack.scheduler) as channel:
        scheduler: Any = SchedulerServiceStub(channel)
        await scheduler.DrainWorker(DrainWorkerRequest(component=component, worker_id=1))


@pytest.mark.timeout(900)
async def test_the_ai_sdk(tmp_path: Path) -> None:
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    directory = tmp_path / "ai_sdk"
    shutil.copytree(HERE / "ai_sdk", directory)
    await install("npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", directory=directory)
    async with system(tmp_path) as stack:
        code, output = await run("node", "check.mjs", f"http://{stack.http}/v1", MODEL, directory=directory)
    assert code == 0, output[-4000:]
