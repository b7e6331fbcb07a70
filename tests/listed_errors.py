"""Compares every error that a service raises in a test with those that docs/reference/errors.md lists for the call."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import wraps
from typing import Any

import pytest
from kvrouter.v1.errors import KvRouterError

from .reference_pages import TYPES, errors_of_calls, named, section


def check_errors_of(service: type, patched: pytest.MonkeyPatch) -> None:
    """Lets every call of a service fail with an AssertionError if it raises an error that is not listed for it."""
    of_any_call = named(section("errors.md", "Any call"))
    for call, listed in errors_of_calls(service.__name__).items():
        method = getattr(service, call)
        patched.setattr(service, call, _checked(method, f"{service.__name__}.{call}", listed | of_any_call))


def _checked(method: Callable[..., Any], name: str, listed: set[str]) -> Callable[..., Any]:
    @contextmanager
    def check() -> Iterator[None]:
        try:
            yield
        except KvRouterError as error:
            kinds = {kind for kind, each in TYPES.items() if isinstance(error, each)}
            if not kinds & listed:
                raise AssertionError(f"errors.md does not list {type(error).__name__} for {name}") from error
            raise

    if inspect.isasyncgenfunction(method):

        @wraps(method)
        async def generate(*args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
            with check():
                async with aclosing(method(*args, **kwargs)) as items:
                    async for item in items:
                        yield item

        return generate

    if inspect.iscoroutinefunction(method):

        @wraps(method)
        async def call(*args: Any, **kwargs: Any) -> Any:
            with check():
                return await method(*args, **kwargs)

        return call

    @wraps(method)
    def answer(*args: Any, **kwargs: Any) -> Any:
        with check():
            return method(*args, **kwargs)

    return answer
