"""Runs chats and completions: tokenizes their prompts, and runs a request for each sequence."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvrouter.frontend.edge.choice import Choice, ChoiceSink
from kvrouter.frontend.edge.frame import ResponseFrame
from kvrouter.frontend.edge.text_request import TextRequest
from kvrouter.frontend.edge.token_list import TokenPrompt
from kvrouter.frontend.packed_prompt import TOKEN_BYTES
from kvrouter.frontend.request.gen_ai import CHAT, TEXT_COMPLETION
from kvrouter.frontend.request.model_pools import CONSTRAINT_FIELD, context_length, structured_workers
from kvrouter.frontend.request.request_checks import Limits, prompt_limit
from kvrouter.frontend.request.request_runner import RequestRunner
from kvrouter.frontend.request.served_models import ServedModels
from kvrouter.frontend.text.client_work import completed
from kvrouter.frontend.text.model_text import ModelText, PromptSource
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.v1.errors import BadRequest, KvRouterError
from msgspec.structs import replace

UNKNOWN_LENGTH_TOKENS = 4096
"""Output tokens of a chat without ``max_tokens`` whose model's length is not known."""


@dataclass(frozen=True, slots=True)
class PreparedText:
    """A request whose prompts are tokenized."""

    frame: ResponseFrame
    pools: Sequence[ComponentView]
    """The pools of the model, at least one, that with the most live workers first."""


async def prepare(models: ServedModels, limits: Limits, request: TextRequest) -> PreparedText:
    """Tokenizes the prompts of a request. Nothing is booked yet.

    Raises:
        UnknownModel, NoWorkers, BadRequest, PromptTooLong, RateLimited, Overloaded.
    """
    view = models.resolve(request.fields.model).views[0]
    model = view.model
    pools = models.pools(request.fields.model, forwarding=False)
    constraint = request.constraint
    if constraint is not None:
        able = [pool for pool in pools if any(worker.serves_structured_output for worker in pool.workers.values())]
        if not able:
            structured_workers(view, constraint[0])
        pools = able or pools
    needed = request.needs_text()
    text = models.text_of(request.fields.model, needed) if needed else models.texts.find(model)
    with prompt_limit(pools, limits) as limit:
        if text is None:
            prompts = [completed(prompt.slices(None, limit)) for prompt in request.prompts]
        else:
            prompts = await models.texts.tokens(text, request.prompts, limit, salt=request.fields.cache_salt or "")
    for prompt, source in zip(prompts, request.prompts, strict=True):
        if not prompt:
            raise BadRequest("the prompt is empty", field=source.field, advice="Send at least one token.")
    texts: list[str] = []
    if text is not None and _needs_texts(request, text):
        texts = [await models.texts.text_of_prompt(text, prompt) for prompt in prompts]
    return PreparedText(ResponseFrame(request, text, prompts, texts), pools)


def _needs_texts(request: TextRequest, text: ModelText) -> bool:
    """Returns whether the response depends on the text of prompts that the request does not have."""
    if request.is_chat:
        return request.continues_message and text.reasoning_format is not None
    return request.echo and any(isinstance(prompt, TokenPrompt) for prompt in request.prompts)


async def count_tokens(models: ServedModels, limits: Limits, model: str, prompt: PromptSource) -> int:
    """Returns the number of tokens a prompt has for a model.

    Raises:
        UnknownModel, NoWorkers, BadRequest, PromptTooLong, RateLimited, Overloaded.
    """
    text = models.text_of(model, prompt.field)
    (tokens,) = await models.texts.tokens(text, [prompt], limits.max_prompt_tokens)
    return len(tokens) // TOKEN_BYTES


async def run_all(runner: RequestRunner, prepared: PreparedText, sink: ChoiceSink) -> None:
    """Runs all sequences to their end. The first error ends all.

    Raises:
        KvRouterError: a sequence failed.
    """
    try:
        await _run_all(runner, prepared, sink)
    except KvRouterError as error:
        constraint = prepared.frame.request.constraint
        if constraint is not None and error.info.field == CONSTRAINT_FIELD:
            error.info.field = constraint[0]
        raise


async def _run_all(runner: RequestRunner, prepared: PreparedText, sink: ChoiceSink) -> None:
    frame = prepared.frame
    request = frame.request
    runs = []
    for index in range(len(frame.prompts) * request.sequences):
        prompt = frame.prompt_of(index)
        choice = Choice(index, frame, sink)
        generate = request.generate_request(_max_tokens(runner.limits, prepared, prompt))
        seed = generate.sampling.seed
        if index % request.sequences and seed is not None:
            seed = (seed + index % request.sequences) % (1 << 64)
            generate.sampling = replace(generate.sampling, seed=seed)
        runs.append((generate, prompt, choice))
    operation = CHAT if request.is_chat else TEXT_COMPLETION
    if len(runs) == 1:
        await runner.run(*runs[0], operation=operation)
        return
    try:
        async with asyncio.TaskGroup() as group:
            for run in runs:
                group.create_task(runner.run(*run, operation=operation))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _max_tokens(limits: Limits, prepared: PreparedText, prompt: bytes) -> int:
    given = prepared.frame.request.max_tokens
    if given is not None:
        return given
    tokens = len(prompt) // TOKEN_BYTES
    length = context_length(tokens, prepared.pools)
    rest = length - tokens if length else UNKNOWN_LENGTH_TOKENS
    return max(1, min(rest, limits.max_output_tokens))
