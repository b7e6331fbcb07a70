"""The official clients of the OpenAI and Anthropic APIs for Node parse streams and errors."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kvrouter.devtools.system.small_tokenizer import VOCABULARY_SIZE, write_small_tokenizer

from ...integration.frontend.gateway import MODEL, System, running_system
from ...waiting import until

NODE = Path(__file__).parent / "node"
NO_REGISTRY = re.compile(r"ENOTFOUND|ECONNREFUSED|EAI_AGAIN|ETIMEDOUT|ENETUNREACH|E404|ENOTCACHED")


async def run(*command: str, directory: Path) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        *command, cwd=directory, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(240):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, output.decode()


def refusal(status: int, param: str) -> dict[str, Any]:
    name = "NotFoundError" if status == 404 else "BadRequestError"
    return {"error": name, "status": status, "param": param, "type": "invalid_request_error"}


@pytest.fixture
async def directory(tmp_path: Path) -> Path:
    """The programs, with their packages installed."""
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    directory = tmp_path / "node"
    shutil.copytree(NODE, directory)
    code, output = await run("npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", directory=directory)
    if code and NO_REGISTRY.search(output):
        pytest.skip("npm install openai: needs a package registry")
    assert code == 0, output
    return directory


@pytest.fixture
async def system(tmp_path: Path, nats_url: str, etcd_endpoint: str, namespace: str) -> AsyncIterator[System]:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    write_small_tokenizer(tokenizer)
    async with running_system(nats_url, etcd_endpoint, namespace, tokenizers={MODEL: str(tokenizer)}) as running:
        await running.start_worker(1, vocabulary_size=VOCABULARY_SIZE)
        await until(lambda: running.frontend.models.has_text(MODEL))
        yield running


async def called(directory: Path, system: System, program: str, url: str) -> dict[str, Any]:
    """Returns what a program prints of each call, by its name."""
    code, output = await run("node", program, url, MODEL, directory=directory)
    await system.until_idle()
    assert code == 0, output
    return {each.pop("name"): each for each in map(json.loads, output.splitlines())}


@pytest.mark.timeout(600)
async def test_the_packages_of_agents_parse_every_response(directory: Path, system: System) -> None:
    found = await called(directory, system, "agents.mjs", f"http://{system.http}")
    failed = [found.pop(name) for name in ("messageError", "messageModelError")]
    expected = [("BadRequestError", 400, "invalid_request_error"), ("NotFoundError", 404, "not_found_error")]
    assert [(each["error"], each["status"], each["type"]) for each in failed] == expected
    assert found == {
        "message": {"blocks": ["text"], "end": "max_tokens", "tokens": 8},
        "messageStream": {"blocks": ["text"], "end": "max_tokens", "tokens": 8},
        "count": {"counted": True},
        "response": {"items": ["message"], "end": "incomplete", "tokens": 8},
        "responseStream": {"text": True, "end": "response.incomplete", "tokens": 8},
        "storeError": refusal(400, "store"),
    }


@pytest.mark.timeout(600)
async def test_the_package_parses_every_response(directory: Path, system: System) -> None:
    assert await called(directory, system, "check.mjs", f"http://{system.http}/v1") == {
        "models": {"ids": [MODEL]},
        "model": {"id": MODEL},
        "chat": {"tokens": 8, "worker": "1:0"},
        "sequences": {"choices": 3},
        "tools": {"end": "length"},
        "logprobs": {"top": 2},
        "stream": {"text": True, "end": "length", "tokens": 8},
        "completion": {"text": True, "end": "length", "tokens": None},
        "abort": {"aborted": True},
        "sequencesError": refusal(400, "n"),
        "messagesError": refusal(400, "messages"),
        "streamError": refusal(400, "temperature"),
        "formatError": refusal(400, "response_format"),
        "lengthError": refusal(400, "prompt"),
        "modelError": refusal(404, "model"),
        "unknownModelError": refusal(404, "model"),
    }
