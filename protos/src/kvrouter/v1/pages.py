"""Pages of a list that a unary call returns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Protocol, TypeVar

from kvrouter.v1.errors import BadRequest

MAX_PAGE = 1000
"""Maximum number of entries of a page, and their number without ``page_size``."""

_Item = TypeVar("_Item")


class PagedRequest(Protocol):
    """A request for a page."""

    page_size: int
    page_token: str

    def __contains__(self, field_name: str, /) -> bool:
        """Returns whether an optional field is set."""


class PagedResponse(Protocol):
    """A page."""

    next_page_token: str


_Request = TypeVar("_Request", bound=PagedRequest)
_Response = TypeVar("_Response", bound=PagedResponse)


def page_of(items: Iterable[_Item], request: PagedRequest, key: Callable[[_Item], str]) -> tuple[list[_Item], str]:
    """Returns a page of items in order of their keys, and the token of the next page; empty after the last one.

    A token is the key of the last item before its page, so items that come or go between two calls neither repeat nor
    hide others.

    Raises:
        BadRequest: ``page_size`` is 0.
    """
    if "page_size" in request and not request.page_size:
        raise BadRequest(
            "expected page_size of 1 or more, received 0",
            advice=f"Leave it unset for {MAX_PAGE} entries.",
            field="page_size",
        )
    ordered = sorted(items, key=key)
    start = bisect_right(ordered, request.page_token, key=key) if request.page_token else 0
    end = start + min(request.page_size or MAX_PAGE, MAX_PAGE)
    return ordered[start:end], key(ordered[end - 1]) if end < len(ordered) else ""


async def all_pages(call: Callable[[_Request], Awaitable[_Response]], request: _Request) -> AsyncIterator[_Response]:
    """Yields the pages of a list from the one that the request names. Changes the request."""
    while True:
        page = await call(request)
        yield page
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


_Overview = TypeVar("_Overview", bound="ComponentsPage")


class ComponentsPage(PagedResponse, Protocol):
    """A page of components and their ranks, in order."""

    @property
    def components(self) -> Any:
        """Components, each with those of its ranks that are on the page."""

    def MergeFrom(self, other: Any) -> None:  # noqa: N802 - of protobuf
        """Adds another page."""


async def whole(call: Callable[[_Request], Awaitable[_Overview]], request: _Request) -> _Overview:
    """Returns all pages of components as one. Changes the request."""
    merged: _Overview | None = None
    async for page in all_pages(call, request):
        if merged is None:
            merged = page
            continue
        if page.components and merged.components[-1].component == page.components[0].component:
            merged.components[-1].ranks.extend(page.components[0].ranks)
            del page.components[0]
        merged.MergeFrom(page)
    if merged is None:
        raise AssertionError("a list has a page")
    merged.next_page_token = ""
    return merged
