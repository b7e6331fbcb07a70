"""Compares the tokens of probe chats with those engines give them, once for each engine.

Forwarded chats find their prefix only if the Frontend renders and tokenizes them as their engine does. vLLM and SGLang
say how they do it at ``/tokenize``. An engine without it is not compared.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Final

import aiohttp
import msgspec
import structlog
from kvrouter.engines.keys import EngineKeys
from kvrouter.frontend.proxy.routed_body import RoutedBody
from kvrouter.frontend.text.model_text import ModelText
from kvrouter.frontend.text.text_models import TextModels
from kvrouter.net.ticks import tick
from kvrouter.runtime.discovery.directory import Directory
from kvrouter.v1.errors import BadRequest, KvRouterError
from kvrouter.v1.registry_pb2 import WorkerRegistration
from prometheus_client import CollectorRegistry, Gauge

log = structlog.get_logger(component="frontend")

_PATH = "/tokenize"
_PAUSE_SECONDS = 2.0
"""Interval at which new engines and tokenizers are looked for."""
_ANSWER_SECONDS = 10.0
_MAX_TOKENS = 1 << 16
_CITY = {"type": "string", "description": "City, such as M\u00fcnchen"}
_NESTED = {"type": "object", "properties": {"lat": {"type": "number"}, "tags": {"type": "array", "items": _CITY}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": _CITY, "at": _NESTED}, "required": ["city"]},
    },
}
_ODD_TOOLS = [
    {"function": {"strict": True, "parameters": {"type": "object"}, "name": "now"}, "type": "function"},
    {"type": "function", "function": {"description": 'Says "<b>" & more', "name": "say"}},
]
_USER = {"role": "user", "content": "What is the weather in M\u00fcnchen?"}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
PROBES: Final[Mapping[str, Mapping[str, Any]]] = {
    "a chat": {"messages": [_USER]},
    "a system prompt": {"messages": [{"role": "system", "content": "Be brief."}, _USER]},
    "several turns": {"messages": [_USER, {"role": "assistant", "content": " Sunny.\n"}, _USER]},
    "contents in parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]}]},
    "tools": {"messages": [_USER], "tools": [_TOOL]},
    "tools with fields that are missing or in another order": {"messages": [_USER], "tools": _ODD_TOOLS},
    "a call and its result": {
        "messages": [
            _USER,
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call00001", "content": "22 \u00b0C"},
        ],
        "tools": [_TOOL],
    },
}
"""Chats by their contents."""


class _Answer(msgspec.Struct):
    tokens: list[int]


_decode = msgspec.json.Decoder(_Answer).decode


class _Unanswered(Exception):
    """The engine cannot be reached at the moment."""


class PromptComparison:
    """The found differences. ``run`` must be running."""

    def __init__(
        self, directory: Directory, texts: TextModels, engine_keys: EngineKeys, registry: CollectorRegistry
    ) -> None:
        self._directory = directory
        self._texts = texts
        self._engine_keys = engine_keys
        self._compared: dict[tuple[str, int], tuple[ModelText, str]] = {}
        """By URL and time of registration: with which tokenizer an engine was compared, and how they differ."""
        Gauge(
            "kvrouter_frontend_prompt_differences",
            "Engines that give probe chats other tokens than this Frontend does.",
            registry=registry,
        ).set_function(lambda: sum(bool(difference) for _, difference in self._compared.values()))

    def difference(self, worker: WorkerRegistration) -> str:
        """Returns how the tokens of a worker's engine differ; empty if they do not, or were not compared."""
        _, difference = self._compared.get(_key(worker), (None, ""))
        return difference

    async def run(self) -> None:
        """Compares each engine once it is registered and its model has a tokenizer, until cancelled."""
        timeout = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                workers = {_key(worker): worker for worker in self._workers()}
                self._compared = {key: kept for key, kept in self._compared.items() if key in workers}
                for key, worker in workers.items():
                    text = self._texts.find(worker.model)
                    if text is None or text.template is None or self._compared.get(key, (None,))[0] is text:
                        continue
                    try:
                        self._compared[key] = (text, await self._compare(session, worker, text))
                    except _Unanswered:
                        continue  # It is tried again.
                await tick(_PAUSE_SECONDS)

    def _workers(self) -> Iterable[WorkerRegistration]:
        for view in self._directory.components.values():
            for worker in view.workers.values():
                if worker.openai_endpoint and not worker.draining:
                    yield worker

    async def _compare(self, session: aiohttp.ClientSession, worker: WorkerRegistration, text: ModelText) -> str:
        compared = 0
        async for probe, own, engines in self._tokens(session, worker, text):
            compared += 1
            if own == engines:
                continue
            pairs = enumerate(zip(own, engines, strict=False))
            at = next((at for at, (here, there) in pairs if here != there), min(len(own), len(engines)))
            expected, received = (str(ids[at]) if at < len(ids) else "the end" for ids in (engines, own))
            log.warning(
                "prompts.differ",
                component_name=f"{worker.component.namespace}/{worker.component.name}",
                worker_id=worker.worker_id,
                engine=worker.engine or "unknown",
                probe=probe,
                position=at,
                engines_token=expected,
                own_token=received,
            )
            return f"{probe}: token {at} is {expected} at the engine and {received} here"
        if compared:
            log.info("prompts.compared", worker_id=worker.worker_id, model=worker.model, probes=compared)
        return ""

    async def _tokens(
        self, session: aiohttp.ClientSession, worker: WorkerRegistration, text: ModelText
    ) -> AsyncIterator[tuple[str, list[int], list[int]]]:
        """Yields the tokens of each probe both render: here, and at the engine.

        Raises:
            _Unanswered: the engine cannot be reached.
        """
        for name, probe in PROBES.items():
            body = msgspec.json.encode({"model": worker.model, **probe})
            source = RoutedBody.parse(body, max_prompt_tokens=_MAX_TOKENS).source
            engines = await self._of_engine(session, worker, body)
            if source is None or engines is None:
                continue
            try:
                (own,) = await self._texts.tokens(text, [source], _MAX_TOKENS)
            except BadRequest:
                continue  # Such a chat is not routed by its tokens.
            except KvRouterError as error:
                raise _Unanswered(error.message) from None
            yield name, array("I", own).tolist(), engines

    async def _of_engine(
        self, session: aiohttp.ClientSession, worker: WorkerRegistration, body: bytes
    ) -> list[int] | None:
        headers = {"content-type": "application/json"} | self._engine_keys.headers(worker.component.name)
        url = f"{worker.openai_endpoint.rstrip('/')}{_PATH}"
        try:
            async with session.post(url, data=body, headers=headers, allow_redirects=False) as answer:
                if answer.status != 200:
                    return None
                return _decode(await answer.read()).tokens
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _Unanswered(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None


def _key(worker: WorkerRegistration) -> tuple[str, int]:
    return worker.openai_endpoint, worker.registered_unix_ns
