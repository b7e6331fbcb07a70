"""Provokes errors, and expects the library's own types. Arguments: library, URL, model, case, API key of the case."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

WORDS = "word " * 3000
"""More tokens than the model's context has."""


def openai(url: str, model: str, key: str) -> tuple[Callable[[str], object], dict[str, type[Exception]]]:
    import openai
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key=key, max_retries=0)

    def ask(text: str) -> object:
        return client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}])

    return ask, {
        "overflow": openai.BadRequestError,
        "unknown model": openai.NotFoundError,
        "invalid key": openai.AuthenticationError,
        "rate limit": openai.RateLimitError,
        "no worker": openai.InternalServerError,
    }


def litellm(url: str, model: str, key: str) -> tuple[Callable[[str], object], dict[str, type[Exception]]]:
    import litellm

    def ask(text: str) -> object:
        messages = [{"role": "user", "content": text}]
        return litellm.completion(
            model=f"openai/{model}", api_base=url, api_key=key, messages=messages, max_retries=0, num_retries=0
        )

    return ask, {
        "overflow": litellm.ContextWindowExceededError,
        "unknown model": litellm.NotFoundError,
        "invalid key": litellm.AuthenticationError,
        "rate limit": litellm.RateLimitError,
        "no worker": litellm.ServiceUnavailableError,
    }


def langchain(url: str, model: str, key: str) -> tuple[Callable[[str], object], dict[str, type[Exception]]]:
    import openai
    from langchain_core.exceptions import ContextOverflowError
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=model, base_url=url, api_key=key, max_retries=0).invoke, {
        "overflow": ContextOverflowError,
        "unknown model": openai.NotFoundError,
        "invalid key": openai.AuthenticationError,
        "rate limit": openai.RateLimitError,
        "no worker": openai.InternalServerError,
    }


def pydantic_ai(url: str, model: str, key: str) -> tuple[Callable[[str], object], dict[str, type[Exception]]]:
    from openai import AsyncOpenAI
    from pydantic_ai import Agent, exceptions
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    def ask(text: str) -> object:
        client = AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
        agent = Agent(OpenAIChatModel(model, provider=OpenAIProvider(openai_client=client)))
        return asyncio.run(agent.run(text))

    return ask, {
        "overflow": exceptions.ModelContextWindowExceededError,
        "unknown model": exceptions.ModelNotFoundError,
        "invalid key": exceptions.ModelAuthenticationError,
        "rate limit": exceptions.ModelRateLimitError,
        "no worker": exceptions.ModelUnavailableError,
    }


def check_retry_time(error: Exception) -> None:
    """Checks that the library shows when a retry may succeed, where its errors have that or the response."""
    shown = getattr(error, "retry_after", None)
    if shown is None:
        response: Any = getattr(error, "response", None)
        headers = getattr(error, "litellm_response_headers", None) or response.headers
        shown = headers["retry-after"]
    assert float(shown) > 0, shown


def main(library: str, url: str, model: str, case: str, key: str) -> None:
    libraries = {"openai": openai, "litellm": litellm, "langchain": langchain, "pydantic_ai": pydantic_ai}
    ask, expected = libraries[library](url, "another-model" if case == "unknown model" else model, key)
    if case == "rate limit":
        ask("Hello")
    try:
        ask(WORDS if case == "overflow" else "Hello")
    except expected[case] as error:
        if case in ("rate limit", "no worker"):
            check_retry_time(error)
        return
    raise AssertionError(f"{case}: no error")


if __name__ == "__main__":
    main(*sys.argv[1:])
