"""A text is prepared for any pool of its model, not only for the largest one."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kvrouter.frontend.edge.request_fields import SharedFields
from kvrouter.frontend.edge.text_request import TextRequest
from kvrouter.frontend.edge.text_runner import prepare
from kvrouter.frontend.edge.token_list import TokenPrompt
from kvrouter.frontend.request.request_checks import Limits
from kvrouter.frontend.request.served_models import ServedModels
from kvrouter.frontend.text.client_work import Slices, completed
from kvrouter.frontend.text.model_text import ModelText, PromptSource
from kvrouter.runtime.discovery.directory import ComponentView, Directory
from kvrouter.v1.errors import BadRequest, PromptTooLong
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, WorkerRegistration

LIMITS = Limits(max_prompt_tokens=1000, max_output_tokens=1000)


class Prompt:
    """A prompt of a given length, which is refused above the limit."""

    field, characters = "prompt", 0

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def slices(self, text: ModelText | None, limit: int) -> Slices[bytes]:
        return self.tokens_at_once(text, limit)
        yield

    def tokens_at_once(self, text: ModelText | None, limit: int) -> bytes:
        if self._tokens > limit:
            raise PromptTooLong(self._tokens, limit)
        return bytes(4 * self._tokens)


class Texts:
    """Tokenizers of no model."""

    def find(self, model: str) -> None:
        return None

    def get(self, model: str, field: str) -> Any:
        return SimpleNamespace()

    async def text_of_prompt(self, text: ModelText, prompt: bytes) -> str:
        return f"{len(prompt)} bytes, from a thread"

    async def tokens(self, text: ModelText, prompts: Sequence[PromptSource], limit: int, *, salt: str) -> list[bytes]:
        return [completed(prompt.slices(text, limit)) for prompt in prompts]


def pool(name: str, *, workers: int, longest: int, structured: bool = False) -> ComponentView:
    registered = {i: WorkerRegistration(worker_id=i, serves_structured_output=structured) for i in range(workers)}
    return ComponentView(ComponentName("ns", name), ComponentDescriptor(model="m", max_model_len=longest), registered)


def models(*pools: ComponentView) -> ServedModels:
    directory = SimpleNamespace(components={each.name: each for each in pools})
    return ServedModels(cast(Directory, directory), cast(Any, Texts()), None)


def text_request(tokens: int, **fields: Any) -> TextRequest:
    shared = SharedFields(model="m", **fields)
    return TextRequest(shared, [Prompt(tokens)], None, is_chat=False, constraint=shared.structured_output())


async def test_a_text_that_fits_only_a_smaller_pool_is_not_refused() -> None:
    served = models(pool("large", workers=3, longest=20), pool("long", workers=1, longest=50))
    prepared = await prepare(served, LIMITS, text_request(49))
    assert len(prepared.frame.prompts[0]) == 4 * 49
    with pytest.raises(PromptTooLong, match="This model's maximum context length is 50 tokens"):
        await prepare(served, LIMITS, text_request(50))


async def test_a_constrained_text_needs_one_pool_that_constrains_outputs_and_fits_that() -> None:
    large = pool("large", workers=3, longest=50)
    constrained = text_request(20, guided_json={"type": "object"})
    with pytest.raises(BadRequest, match="constrains"):
        await prepare(models(large), LIMITS, constrained)
    served = models(large, pool("able", workers=1, longest=30, structured=True))
    assert [each.name.name for each in (await prepare(served, LIMITS, constrained)).pools] == ["able"]
    with pytest.raises(PromptTooLong):
        await prepare(served, LIMITS, text_request(30, guided_json={"type": "object"}))


async def test_the_text_of_token_ids_that_the_response_repeats_comes_from_a_thread() -> None:
    prompts: list[PromptSource] = [TokenPrompt(b"[1,2]", limit=10)]
    request = TextRequest(SharedFields(model="m"), prompts, max_tokens=1, is_chat=False, echo=True)
    prepared = await prepare(models(pool("one", workers=1, longest=100)), LIMITS, request)
    assert prepared.frame.echo(0) == "8 bytes, from a thread"
