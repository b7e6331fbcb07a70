"""A worker serves its model's tokenizer, and Frontends serve text with it."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import aiohttp
import pytest
from kvrouter.devtools.system.small_tokenizer import VOCABULARY_SIZE, write_small_tokenizer
from kvrouter.frontend.text.model_files import fetch_files, files_of
from kvrouter.net.etcd import connect
from kvrouter.net.model_files import InvalidModelFiles, read_model_files
from kvrouter.v1.names import ComponentName

from ...waiting import until
from .gateway import MODEL, System


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


async def changed(directory: Path, tmp_path: Path) -> str:
    """Copies the tokenizer with a chat template that raises an error."""
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('replaced') }}")
    return str(tmp_path)


async def test_the_chat_template_of_most_workers_is_used(system: System, directory: Path, tmp_path: Path) -> None:
    await system.start_worker(1, tokenizer=str(directory))
    await until(lambda: system.frontend.models.has_text(MODEL))
    texts = system.frontend.models.texts
    old = texts.find(MODEL)
    other = await changed(directory, tmp_path)
    await system.start_worker(2, tokenizer=other)
    await until(lambda: any(len(view.workers) == 2 for view in system.runtime.directory.components.values()))
    assert (await chat(system)).status == 200
    assert texts.find(MODEL) is old, "one worker of two cannot replace it"
    await system.start_worker(3, tokenizer=other)
    await until(lambda: texts.find(MODEL) is not old)
    assert "replaced" in (await (await chat(system)).json())["error"]["message"]


async def test_a_worker_that_sends_other_content_is_passed_over(
    system: System, directory: Path, tmp_path: Path
) -> None:
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    await system.start_worker(1, tokenizer=str(tmp_path))
    await system.start_worker(2, tokenizer=str(directory))
    await until(lambda: any(len(view.workers) == 2 for view in system.runtime.directory.components.values()))
    (view,) = system.runtime.directory.components.values()
    files = files_of(view.workers[2])
    assert files_of(view.workers[1]) == files
    # What worker 1 has registered is no longer what it reads.
    (tmp_path / "tokenizer_config.json").write_text("{}")
    expected = read_model_files(directory)
    for _ in range(8):  # in any order
        assert await fetch_files(files, list(view.workers.values()), None) == expected
    with pytest.raises(InvalidModelFiles, match=r"tokenizer_config\.json cannot be fetched: worker 1 sent"):
        await fetch_files(files, [view.workers[1]], None)


async def test_the_files_survive_the_loss_of_the_descriptor(system: System, directory: Path) -> None:
    await system.start_worker(1, tokenizer=str(directory))
    await until(lambda: system.frontend.models.has_text(MODEL))
    (view,) = system.runtime.directory.components.values()
    files = files_of(view.workers[1])
    component = ComponentName(system.where["namespace"], "workers")
    keys = [component.descriptor_key.encode(), component.worker_key(1).encode()]
    async with connect(system.where["etcd"]) as etcd:
        # Both are lost, as when etcd is restored from an old backup.
        for key in keys:
            await etcd.delete(key)
        async with asyncio.timeout(30):
            while not all([await etcd.get(key) for key in keys]):
                await asyncio.sleep(0.01)
    await until(lambda: any(1 in each.workers for each in system.runtime.directory.components.values()))
    (view,) = system.runtime.directory.components.values()
    assert files_of(view.workers[1]) == files
    await system.until_candidate(1)
    assert (await chat(system)).status == 200


async def test_files_that_are_no_tokenizer_are_refused_by_the_worker(system: System, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({}))
    await system.start_worker(1, tokenizer=str(tmp_path))
    assert (await chat(system)).status == 400
