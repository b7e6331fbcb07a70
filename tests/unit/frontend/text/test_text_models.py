"""Prompts are rendered as the engine of most workers renders them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvrouter.engines.chats import chat_rule
from kvrouter.frontend.text.client_work import ClientWork
from kvrouter.frontend.text.text_models import TextModels
from kvrouter.v1.errors import BadRequest, NotReady
from kvrouter.v1.registry_pb2 import WorkerRegistration
from prometheus_client import CollectorRegistry

from ....byte_tokenizer import write_byte_tokenizer


class Registered:
    """A directory with one component, whose workers change between two loads."""

    def __init__(self, *states: list[str]) -> None:
        self._states = states
        self.components: dict[str, Any] = {}

    async def changes(self) -> AsyncIterator[Registered]:
        for engines in self._states:
            workers = {number: WorkerRegistration(engine=engine) for number, engine in enumerate(engines)}
            self.components = {"a": SimpleNamespace(model="m", workers=workers)}
            yield self


async def rule_after(directory: Path, *states: list[str]) -> object:
    registry = CollectorRegistry()
    registered: Any = Registered(*states)
    unused: Any = None
    texts = TextModels(registered, unused, {"m": directory}, registry, work=ClientWork(registry), cache_bytes=1 << 20)
    await asyncio.wait_for(texts.run(), 30)
    return texts.get("m", "messages").chat_rule


async def test_the_rule_is_that_of_most_workers_and_stays_while_there_are_none(tmp_path: Path) -> None:
    directory = write_byte_tokenizer(tmp_path / "model")
    assert await rule_after(directory, []) == chat_rule("")
    assert await rule_after(directory, [], ["vllm", "sglang", "sglang"]) == chat_rule("sglang")
    assert await rule_after(directory, ["vllm"], ["", ""]) == chat_rule("vllm")
    assert await rule_after(directory, ["vllm", "vllm"], ["sglang", "vllm"], ["sglang"]) == chat_rule("sglang")


async def test_a_tokenizer_that_is_being_loaded_is_worth_a_retry(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    registered: Any = Registered([])
    unused: Any = None
    directories = {"m": write_byte_tokenizer(tmp_path / "model")}
    texts = TextModels(registered, unused, directories, registry, work=ClientWork(registry), cache_bytes=1 << 20)
    with pytest.raises(BadRequest, match="needs a tokenizer"):
        texts.get("m", "messages")
    async for _ in registered.changes():
        with pytest.raises(NotReady, match="is being loaded"):
            texts.get("m", "messages")
        with pytest.raises(BadRequest, match="no worker publishes one"):
            texts.get("other", "messages")
