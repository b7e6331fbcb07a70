"""A worker publishes its model's tokenizer, and Frontends serve text with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import aiohttp
import pytest
from kvrouter.devtools.system.small_tokenizer import VOCABULARY_SIZE, write_small_tokenizer
from kvrouter.net.etcd import connect
from kvrouter.v1.names import ComponentName

from .gateway import MODEL, System, until


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_small_tokenizer(directory)
    return directory


async def chat(system: System) -> aiohttp.ClientResponse:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    url = f"http://{system.http}/v1/chat/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as response:
        await response.read()
        return response


async def test_text_is_served_once_a_worker_has_published_its_tokenizer(system: System, directory: Path) -> None:
    await system.start_worker(1, vocabulary_size=VOCABULARY_SIZE)
    refused = await chat(system)
    assert refused.status == 400
    assert (await refused.json())["error"]["param"] == "messages"
    await system.start_worker(2, vocabulary_size=VOCABULARY_SIZE, tokenizer=str(directory))
    await until(lambda: system.frontend.models.has_text(MODEL))
    assert (await chat(system)).status == 200


async def test_a_changed_chat_template_replaces_the_old_one(system: System, directory: Path, tmp_path: Path) -> None:
    await system.start_worker(1, tokenizer=str(directory))
    await until(lambda: system.frontend.models.has_text(MODEL))
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('replaced') }}")
    await system.start_worker(2, tokenizer=str(tmp_path))
    texts = system.frontend.models.texts
    old = texts.find(MODEL)
    await until(lambda: texts.find(MODEL) is not old)
    assert "replaced" in (await (await chat(system)).json())["error"]["message"]


async def test_the_files_survive_the_loss_of_the_descriptor(system: System, directory: Path) -> None:
    worker = await system.start_worker(1, tokenizer=str(directory))
    await until(lambda: system.frontend.models.has_text(MODEL))
    component = ComponentName(system.where["namespace"], "workers")
    async with connect(system.where["etcd"]) as client:
        # Both are lost, as when etcd is restored from an old backup; the worker writes both again.
        await client.delete(component.descriptor_key.encode())
        await client.delete(component.worker_key(1).encode())
    await worker.registered()
    await until(lambda: bool(system.runtime.directory.components))

    def named() -> bool:
        views = system.runtime.directory.components.values()
        return any(view.descriptor.model_files and view.workers for view in views)

    await until(named)


async def test_files_that_are_no_tokenizer_are_refused_by_the_worker(system: System, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({}))
    await system.start_worker(1, tokenizer=str(tmp_path))
    assert (await chat(system)).status == 400
