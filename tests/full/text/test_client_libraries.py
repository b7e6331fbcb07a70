"""Libraries over the OpenAI API do what their guides show, on a system as ``make up`` starts it."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from kvrouter.devtools.system.stack import Stack, StackOptions, running_stack

HERE = Path(__file__).parent
PACKAGES = {"instructor": "instructor", "pydantic_ai": "pydantic-ai-slim[openai]"}
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


@pytest.mark.timeout(900)
@pytest.mark.parametrize("library", PACKAGES)
async def test_a_library_for_python(library: str, tmp_path: Path) -> None:
    python = str(tmp_path / "environment" / "bin" / "python")
    await install(sys.executable, "-m", "venv", "environment", directory=tmp_path)
    await install(python, "-m", "pip", "install", "--quiet", PACKAGES[library], directory=tmp_path)
    async with system(tmp_path) as stack:
        check = (str(HERE / "python_libraries.py"), library, f"http://{stack.http}/v1", MODEL)
        code, output = await run(python, "-I", *check, directory=tmp_path)
    assert code == 0, output[-4000:]


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
