"""A whole system whose connections are all encrypted and authenticated serves requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from kvrouter.devtools.system.stack import Stack, StackOptions, running_stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    logs = tmp_path / "logs"
    logs.mkdir()
    options = StackOptions(directory=tmp_path, logs=logs, workers=2, clock=10.0, secure=True)
    async with running_stack(options) as running:
        yield running


async def test_a_request_passes_through_a_secure_system(stack: Stack) -> None:
    assert stack.tls is not None
    body = {"model": stack.options.model, "prompt": list(range(64)), "max_tokens": 4}
    async with aiohttp.ClientSession() as session:
        url = f"https://{stack.http}/v1/completions"
        async with session.post(url, json=body, ssl=stack.tls.client_context()) as response:
            assert response.status == 200, await response.text()
            assert (await response.json())["usage"]["completion_tokens"] == 4
        with pytest.raises(aiohttp.ClientError):
            await session.post(f"http://{stack.http}/v1/completions", json=body)
