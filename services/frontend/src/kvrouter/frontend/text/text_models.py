"""Loads the tokenizers and chat templates of the served models: from the operator's directories or the workers."""

from __future__ import annotations

import asyncio
from collections import Counter as Votes
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import structlog
from kvrouter.frontend.text.call_reader import ToolFormatName
from kvrouter.frontend.text.client_work import ClientWork, Lane, Slices
from kvrouter.frontend.text.model_files import Files, agreed_files
from kvrouter.frontend.text.model_text import ModelText, PromptSource
from kvrouter.frontend.text.output_text import ReasoningFormatName
from kvrouter.frontend.text.tokenizer import InvalidTokenizer
from kvrouter.net.model_files import InvalidModelFiles, read_model_files
from kvrouter.runtime.discovery.directory import ComponentView, Directory
from kvrouter.v1.errors import BadRequest, NotReady
from kvrouter.v1.registry_pb2 import WorkerRegistration
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_RETRY_SECONDS = 5.0
"""Pause before files that could not be fetched or loaded are tried again."""
SHORT_CHARACTERS = 64 << 10
"""Maximum size of prompts the thread for short texts takes."""
_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)

log = structlog.get_logger(component="frontend")

Fetch = Callable[[Files, Sequence[WorkerRegistration]], Awaitable[Mapping[str, bytes]]]
"""Returns the content of files that some of the workers serve."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the files of a model are."""

    directory: Path | None
    files: Files
    workers: tuple[WorkerRegistration, ...] = field(default=(), compare=False)
    """Those that may serve the files."""
    engine: tuple[str, str] = ("", "")
    """Engine of most workers and the model as it names it; empty if they do not say."""


class TextModels:
    """Tokenizers and templates by model. ``run`` must be running."""

    def __init__(
        self,
        directory: Directory,
        fetch: Fetch,
        directories: Mapping[str, Path],
        registry: CollectorRegistry,
        *,
        work: ClientWork,
        cache_bytes: int,
        pinned_files: Mapping[str, Files] = MappingProxyType({}),
        tool_call_formats: Mapping[str, ToolFormatName] = MappingProxyType({}),
        reasoning_formats: Mapping[str, ReasoningFormatName] = MappingProxyType({}),
    ) -> None:
        """Loads nothing yet.

        Args:
            directory: The served models, with the files of their workers.
            fetch: Fetches files from workers.
            directories: Directories of the operator's choice, by model. They take precedence.
            registry: Registry for the metrics.
            work: Threads for rendering and tokenizing.
            cache_bytes: Memory of the cache of each model's tokenizer.
            pinned_files: Files by model used instead of those most workers register.
            tool_call_formats: Formats of tool calls by model, instead of that of the files or the chat template.
            reasoning_formats: Formats of reasoning by model, instead of that of the files.
        """
        self.work = work
        """Threads for the work of clients."""
        self._directory = directory
        self._fetch = fetch
        self._directories = directories
        self._cache_bytes = cache_bytes
        self._pinned_files = pinned_files
        self._tool_call_formats = tool_call_formats
        self._reasoning_formats = reasoning_formats
        self._loaded: dict[str, ModelText] = {}
        self._sources: dict[str, _Source] = {}
        self._failures: dict[str, str] = {}
        self._counted: object = None
        """The registrations from which the following was derived."""
        self._registered: dict[str, int] = {}
        loaded = Gauge("kvrouter_frontend_tokenizers", "Models whose tokenizer is loaded.", registry=registry)
        loaded.set_function(lambda: len(self._loaded))
        self._failed = Counter(
            "kvrouter_frontend_tokenizer_failures", "Tokenizers that could not be loaded.", registry=registry
        )
        self._seconds = Histogram(
            "kvrouter_frontend_tokenization_seconds",
            "Time to render and tokenize a prompt, waiting for a thread included.",
            buckets=_BUCKETS,
            registry=registry,
        )

    @property
    def any_loaded(self) -> bool:
        """Whether any model has a tokenizer."""
        return bool(self._loaded)

    def find(self, model: str) -> ModelText | None:
        """Returns the tokenizer and template of a model; None if there is none."""
        return self._loaded.get(model)

    def vocabulary_size(self, model: str) -> int:
        """Returns the number of token ids of a model: those of its tokenizer, or more if most workers say so.

        It is 0 if neither is known.
        """
        components = self._directory.components
        if components is not self._counted:
            self._counted, self._registered = components, _registered_vocabularies(components.values())
        text, registered = self._loaded.get(model), self._registered.get(model, 0)
        return registered if text is None else max(text.tokenizer.vocabulary_size, registered)

    def get(self, model: str, field: str) -> ModelText:
        """Returns the tokenizer and template of a model, which a field of the request needs.

        Raises:
            BadRequest: there is none; the error says why.
            NotReady: it is being loaded.
        """
        found = self._loaded.get(model)
        if found is None:
            if model not in self._failures and model in self._wanted(self._directory):
                raise NotReady(f"the tokenizer of the model {model[:128]!r} is being loaded")
            reason = self._failures.get(model, "no worker publishes one, and no directory is set for it")
            raise BadRequest(
                f"{field} needs a tokenizer, and the model {model[:128]!r} has none here: {reason}",
                field=field,
                advice="Send token ids to /v1/completions, or publish the model's tokenizer.",
            )
        return found

    async def text_of_prompt(self, text: ModelText, prompt: bytes) -> str:
        """Returns the text of a prompt, a packed buffer, from a thread.

        Raises:
            RateLimited, Overloaded: too much text waits for a thread.
        """
        lane = Lane.SHORT_TEXTS if len(prompt) <= SHORT_CHARACTERS else Lane.LONG_TEXTS
        return await self.work.run(partial(text.text_of_prompt, prompt), lane, size=len(prompt))

    async def tokens(
        self, text: ModelText, prompts: Sequence[PromptSource], limit: int, *, salt: str = ""
    ) -> list[bytes]:
        """Returns the tokens of prompts as packed buffers: at once if nearly all is known, otherwise from a thread.

        The cache of earlier prompts depends on the caller's isolation, as its cache blocks do.

        Args:
            text: The model's tokenizer and template.
            prompts: The prompts.
            limit: Maximum number of tokens of each.
            salt: Salt of the prompts' cache blocks.

        Raises:
            BadRequest, PromptTooLong.
            RateLimited, Overloaded: too much text waits for a thread.
        """
        tenant = self.work.owner().cache_tenant
        domain = f"{tenant}\0{salt}" if tenant or salt else ""
        known = text.of_known_domain(domain) if domain else text
        with self._seconds.time():
            found: list[bytes] = []
            for prompt in prompts:
                tokens = None if known is None else prompt.tokens_at_once(known, limit)
                if tokens is None:
                    break
                found.append(tokens)
            else:
                return found
            rest = prompts[len(found) :]
            characters = sum(prompt.characters for prompt in rest)
            lane = Lane.SHORT_TEXTS if characters <= SHORT_CHARACTERS else Lane.LONG_TEXTS
            slices = _tokenizing(text, domain, rest, limit)
            return found + await self.work.run_slices(slices, lane, size=characters)

    async def run(self) -> None:
        """Loads missing and changed models, until cancelled."""
        async for directory in self._directory.changes():
            while not await self._load_all(self._wanted(directory)):
                try:
                    async with asyncio.timeout(_RETRY_SECONDS):
                        await directory.changed()
                except TimeoutError:
                    continue

    def _wanted(self, directory: Directory) -> dict[str, _Source]:
        views_by_model: dict[str, list[ComponentView]] = {}
        for view in directory.components.values():
            views_by_model.setdefault(view.model, []).append(view)
        sources: dict[str, _Source] = {}
        for model, views in sorted(views_by_model.items()):
            known = self._sources.get(model)
            engine = _common_engine(views, ("", "") if known is None else known.engine)
            if model in self._directories:
                sources[model] = _Source(self._directories[model], (), engine=engine)
                continue
            in_use = known.files if known is not None and model in self._loaded else ()
            files = agreed_files(views, in_use, self._pinned_files.get(model, ()))
            if files:
                workers = tuple(each for view in views for each in view.workers.values())
                sources[model] = _Source(None, files, workers, engine)
        return sources

    async def _load_all(self, sources: Mapping[str, _Source]) -> bool:
        """Returns whether everything is loaded."""
        for model in self._sources.keys() - sources.keys():
            del self._sources[model]
            self._loaded.pop(model, None)
            self._failures.pop(model, None)
        complete = True
        for model, source in sources.items():
            known, loaded = self._sources.get(model), self._loaded.get(model)
            if known == source and model not in self._failures:
                continue
            self._sources[model] = source
            if loaded is not None and known is not None and replace(known, engine=source.engine) == source:
                self._loaded[model] = loaded.rendered_as(*source.engine)
                if model not in self._failures:
                    continue
            complete = await self._load(model, source) and complete
        return complete

    async def _load(self, model: str, source: _Source) -> bool:
        engine, engine_model = source.engine
        try:
            if source.directory is not None:
                files: Mapping[str, bytes] = await asyncio.to_thread(read_model_files, source.directory)
            else:
                files = await self._fetch(source.files, source.workers)
            text = await asyncio.to_thread(
                ModelText,
                files,
                cache_bytes=self._cache_bytes,
                tool_call_format=self._tool_call_formats.get(model),
                reasoning_format_name=self._reasoning_formats.get(model),
                engine=engine,
                engine_model=engine_model,
            )
        except (InvalidModelFiles, InvalidTokenizer, OSError) as error:
            reason = str(error) or repr(error)
            if self._failures.get(model) != reason:
                log.warning("tokenizer.failed", model=model, error=reason, consequence="requests need token ids")
            self._failures[model] = reason
            self._failed.inc()
            return False
        self._failures.pop(model, None)
        self._loaded[model] = text
        log.info(
            "tokenizer.loaded",
            model=model,
            vocabulary=text.tokenizer.vocabulary_size,
            chat_template=text.no_template or "loaded",
            finds_tool_calls=text.tool_format is not None,
            engine=engine or "unknown",
            separates_reasoning=text.reasoning_format is not None,
        )
        return True


def _registered_vocabularies(views: Iterable[ComponentView]) -> dict[str, int]:
    """Returns the number of token ids by model most of its workers register; of as many workers, the largest."""
    votes: dict[str, Votes[int]] = {}
    for view in views:
        sizes = (worker.vocabulary_size for worker in view.workers.values())
        votes.setdefault(view.model, Votes()).update(sizes)
    return {model: max(sizes, key=lambda size: (sizes[size], size)) for model, sizes in votes.items() if sizes}


def _common_engine(views: Sequence[ComponentView], in_use: tuple[str, str]) -> tuple[str, str]:
    """Returns the engine and model most workers register; those in use while none registers any."""
    workers = (worker for view in views for worker in view.workers.values() if worker.engine)
    votes = Votes((worker.engine, worker.tokenizer or worker.model) for worker in workers)
    return min(votes, key=lambda engine: (-votes[engine], engine != in_use, engine), default=in_use)


def _tokenizing(text: ModelText, domain: str, prompts: Sequence[PromptSource], limit: int) -> Slices[list[bytes]]:
    """Tokenizes prompts in slices, and returns their tokens as packed buffers."""
    if domain:
        text = text.of_domain(domain)
    tokens = []
    for index, prompt in enumerate(prompts):
        if index:
            yield
        tokens.append((yield from prompt.slices(text, limit)))
    return tokens
