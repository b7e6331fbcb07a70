"""The official client of the OpenAI API for Node parses streams and errors."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from kvrouter.devtools.system.small_tokenizer import VOCABULARY_SIZE, write_small_tokenizer

from ...integration.frontend.gateway import MODEL, running_system, until

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


@pytest.mark.timeout(600)
async def test_the_package_parses_every_response(
    tmp_path: Path, nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    directory, tokenizer = tmp_path / "node", tmp_path / "tokenizer"
    shutil.copytree(NODE, directory)
    tokenizer.mkdir()
    write_small_tokenizer(tokenizer)
    code, output = await run("npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", directory=directory)
    if code and NO_REGISTRY.search(output):
        pytest.skip("npm install openai: needs a package registry")
    assert code == 0, output
    async with running_system(nats_url, etcd_endpoint, namespace, tokenizers={MODEL: str(tokenizer)}) as system:
        await system.start_worker(1, vocabulary_size=VOCABULARY_SIZE)
        await until(lambda: system.frontend.models.has_text(MODEL))
        code, output = await run("node", "check.mjs", f"http://{system.http}/v1", MODEL, directory=directory)
        await system.until_idle()
    assert code == 0, output
    found = {each.pop("name"): each for each in map(json.loads, output.splitlines())}
    assert found == {
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
