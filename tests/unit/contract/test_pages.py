"""Pages of lists, while their entries come and go."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from kvrouter.v1.errors import BadRequest
from kvrouter.v1.frontend_pb2 import GetWorkerHealthRequest, GetWorkerHealthResponse, WorkerHealth
from kvrouter.v1.pages import MAX_PAGE, all_pages, page_of

IDS = st.sets(st.integers(0, 99))


def key(worker: WorkerHealth) -> str:
    return f"{worker.worker_id:020}"


async def read(lists: list[set[int]], page_size: int | None) -> list[list[int]]:
    """Reads all pages; the call with number n sees the nth list, later ones the last."""
    left = list(lists)

    async def call(request: GetWorkerHealthRequest) -> GetWorkerHealthResponse:
        now = left.pop(0) if len(left) > 1 else left[0]
        page, token = page_of([WorkerHealth(worker_id=each) for each in now], request, key)
        return GetWorkerHealthResponse(workers=page, next_page_token=token)

    pages = all_pages(call, GetWorkerHealthRequest(page_size=page_size))
    return [[worker.worker_id for worker in page.workers] async for page in pages]


@given(st.lists(IDS, min_size=1), st.integers(1, 30))
async def test_pages_have_every_lasting_entry_once_and_in_order(lists: list[set[int]], page_size: int) -> None:
    pages = await read(lists, page_size)
    found = [each for page in pages for each in page]
    assert found == sorted(set(found))
    assert set[int].intersection(*lists) <= set(found) <= set[int].union(*lists)
    assert all(len(page) == page_size for page in pages[:-1])


async def test_a_page_has_a_bound_that_no_request_exceeds() -> None:
    everyone = [set(range(MAX_PAGE + 1))]
    for page_size in (None, MAX_PAGE + 1):
        assert [len(page) for page in await read(everyone, page_size)] == [MAX_PAGE, 1]


async def test_a_page_without_entries_is_refused() -> None:
    with pytest.raises(BadRequest) as refused:
        await read([{1}], 0)
    assert refused.value.info.field == "page_size"
