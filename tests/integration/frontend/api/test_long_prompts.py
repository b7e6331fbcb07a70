"""Long bodies are read, and long texts tokenized, in threads and in slices: never on the event loop."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kvrouter.devtools.system.small_tokenizer import write_small_tokenizer
from kvrouter.frontend.edge import json_body, token_list
from kvrouter.frontend.text.client_work import LONG_BODY_BYTES, SLICE

from ....waiting import until
from ..gateway import MODEL, System, running_system

TEXT = "a word that is known and another " * (4 * LONG_BODY_BYTES // 32)
MESSAGES = {"messages": [{"role": "user", "content": TEXT}]}
TEXTS = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 1},
    "/v1/chat/completions": {**MESSAGES, "max_tokens": 1},
    "/v1/messages": {**MESSAGES, "max_tokens": 1},
    "/v1/responses": {"input": MESSAGES["messages"], "max_output_tokens": 16},
}


@pytest.fixture
async def system(nats_url: str, etcd_endpoint: str, namespace: str, tmp_path: Path) -> AsyncIterator[System]:
    write_small_tokenizer(tmp_path)
    options: Any = {"tokenizers": {MODEL: str(tmp_path)}}
    async with running_system(nats_url, etcd_endpoint, namespace, **options) as running:
        await running.start_worker(2, num_blocks=16_384, max_model_len=1 << 18)
        await until(lambda: running.frontend.models.has_text(MODEL))
        yield running


@pytest.fixture
def on_loop(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Returns what was read on the event loop: function and size of its input, if it is long."""
    read: list[tuple[str, int]] = []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(text: Any, *rest: Any) -> Any:
            if len(text) > LONG_BODY_BYTES and threading.current_thread() is threading.main_thread():
                read.append((function.__name__, len(text)))
            return function(text, *rest)

        return call

    for module, name in (
        (json_body, "find_json_value"),
        (json_body, "json_flaw"),
        (token_list, "tokens_from_json"),
        (token_list, "tokens_to_json"),
    ):
        monkeypatch.setattr(module, name, noted(getattr(module, name)))
    return read


async def accepted(system: System, path: str, body: dict[str, Any]) -> None:
    """Sends a request that succeeds."""
    async with aiohttp.ClientSession(f"http://{system.http}") as session, session.post(path, json=body) as response:
        assert response.status == 200, await response.text()


def slices(system: System, thread: str) -> float:
    """Returns the number of slices that ran in a thread."""
    name = "kvrouter_frontend_client_work_slices_total"
    return system.runtime.registry.get_sample_value(name, {"thread": thread}) or 0.0


async def test_token_ids_are_read_in_a_thread(system: System, on_loop: list[tuple[str, int]]) -> None:
    body = {"model": MODEL, "prompt": [number % 500 for number in range(100_000)], "max_tokens": 1}
    await accepted(system, "/v1/completions", body)
    assert not on_loop
    assert slices(system, "bodies") > 0


@pytest.mark.parametrize("path", TEXTS)
async def test_a_text_is_read_in_a_thread_and_tokenized_in_slices(
    system: System, on_loop: list[tuple[str, int]], path: str
) -> None:
    await accepted(system, path, {"model": MODEL, **TEXTS[path]})
    assert not on_loop
    assert slices(system, "bodies") > 0
    assert slices(system, "long_texts") >= len(TEXT) // SLICE
