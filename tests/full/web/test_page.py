"""The web page in a real browser, with fleets of 3 and 300 workers that are made up, in light and dark.

Screenshots go to the folder KVROUTER_SCREENSHOTS if it is set.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from kvrouter.frontend.recording.popular_prefixes import PopularPrefix
from kvrouter.frontend.web.overview import decision, overview
from kvrouter.frontend.web.problems import problems
from kvrouter.frontend.web.routes import page_routes
from kvrouter.frontend.web.traffic import History, TrafficRates
from kvrouter.runtime.overview.ranks import HitWindow
from kvrouter.runtime.overview.system import FrontendView, IndexerView, SchedulerView, System
from kvrouter.v1.common_pb2 import Component, Rank
from kvrouter.v1.errors import Unauthenticated
from kvrouter.v1.frontend_pb2 import GetWorkerHealthResponse, WorkerHealth, WorkerHealthState
from kvrouter.v1.indexer_pb2 import ComponentStats, GetStatsResponse, RankStats
from kvrouter.v1.scheduler_pb2 import (
    CandidateTerms,
    ComponentStatus,
    Decision,
    GetStatusResponse,
    HitCounts,
    RankStatus,
)

from .browser import BINARY, Browser, browser

pytestmark = pytest.mark.skipif(BINARY is None, reason="no Chromium is installed")

HOSTILE = '<img src=x onerror="document.title=1"> a-model-name-that-is-much-longer-than-anybody-would-expect-it'

TRAFFIC = TrafficRates(
    60, 12.5, 1600,
    {"p50": 0.12, "p95": 0.48, "p99": 2.5}, {"p50": 0.004, "p95": None, "p99": 0.031}, 700, 90_000,
    [{"code": "UNAVAILABLE", "recent": 2, "total": 7}], [{"error": "404 model_not_found", "recent": 1, "total": 3}],
)  # fmt: skip


class MadeUp:
    """The state of a made-up system, in the place of an observer."""

    def __init__(self, workers: int) -> None:
        rng = random.Random(1)
        component = Component(namespace="kvrouter", name="pool")
        health, indexed, ranks = [], [], []
        for worker_id in range(1, workers + 1):
            name = Rank(worker_id=worker_id)
            broken = rng.random() < 0.04
            ranks.append(
                RankStatus(
                    rank=name,
                    registered=True,
                    endpoint=f"10.0.{worker_id // 250}.{worker_id % 250}:7000",
                    total_blocks=16_384,
                    active_blocks=rng.randrange(16_384),
                    active_requests=rng.randrange(60),
                    prefill_tokens=rng.randrange(40_000),
                    draining=rng.random() < 0.03,
                    cache_hits=HitCounts(requests=9, prompt_tokens=9000, cached_tokens=rng.randrange(9000)),
                )
            )
            indexed.append(RankStats(rank=name, blocks=rng.randrange(16_384), lag_us=2000, verified=True))
            state = WorkerHealthState.WORKER_HEALTH_STATE_BACKED_OFF if broken else 1
            health.append(WorkerHealth(component=component, worker_id=worker_id, endpoint="e:1", state=state,
                                       last_failure="out of memory"))  # fmt: skip
        self._decisions = [self._decision(number, component, workers, rng) for number in range(60)]
        pool = ComponentStatus(component=component, model=HOSTILE, mode="forecast", block_size=16, ranks=ranks)
        status = GetStatusResponse(scheduler_id="s-1", ready=True, started_unix_ns=1, components=[pool],
                                   decisions=self._decisions)  # fmt: skip
        stats = ComponentStats(component=component, ready=True, ranks=indexed)
        self._system = System(
            datetime.now(UTC),
            [SchedulerView("10.0.0.1:7002", status)],
            [IndexerView("10.0.0.1:7001", GetStatsResponse(replica_id="i-1", components=[stats]))],
            [FrontendView("10.0.0.1:7003", GetWorkerHealthResponse(workers=health))],
        )
        self._history = History()
        for number in range(120):
            for rank in pool.ranks:
                rank.cache_hits.prompt_tokens += 1000
                rank.cache_hits.cached_tokens += rng.randrange(300, 900)
                rank.cache_hits.predicted_prompt_tokens += 1000
                rank.cache_hits.reachable_cached_tokens += 900
            at = datetime.now(UTC) - timedelta(seconds=10 * (120 - number))
            frozen = GetStatusResponse()
            frozen.CopyFrom(status)
            frozen.components[0].CopyFrom(pool)
            self._history.take(System(at, [SchedulerView("10.0.0.1:7002", frozen)]), 10.0 * number)
        self.key = ""

    @staticmethod
    def _decision(number: int, component: Component, workers: int, rng: random.Random) -> Decision:
        made = Decision(decision_id=number, request_id=f"request-{number}~1", mode="forecast", component=component)
        made.decided_unix_ns = time.time_ns() - number * 1_000_000_000
        made.reason, made.prompt_blocks = "lowest cost", 64
        for worker_id in range(1, min(workers, 16) + 1):
            terms = {"queue_ms": rng.random() * 90, "prefill_ms": rng.random() * 400}
            made.candidates.append(
                CandidateTerms(rank=Rank(worker_id=worker_id), cost=sum(terms.values()), terms=terms)
            )
        made.chosen.worker_id = 1
        return made

    async def overview(self) -> dict[str, Any]:
        rates = HitWindow(60)
        system = replace(self._system, at=datetime.now(UTC))
        rates.take(system, 0.0)
        prefixes = [(PopularPrefix(number, HOSTILE, b"", 4096 >> number, 900.0), 7) for number in range(5)]
        return overview(system, rates, rates, history=self._history.points, prefixes=prefixes, traffic=TRAFFIC,
                        found=problems(system, rates), roles={}, frontend_ids={})  # fmt: skip

    async def decision(self, scheduler: str, decision_id: int) -> dict[str, Any]:
        return decision(self._decisions[decision_id], scheduler)


@asynccontextmanager
async def served(observer: MadeUp, key: str = "") -> AsyncIterator[str]:
    """Serves the page of a made-up system; its data needs the key, if there is one."""

    @web.middleware
    async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
        if key and "/data/" in request.path and request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": {"message": str(Unauthenticated("the key is wrong"))}}, status=401)
        return await handler(request)

    app = web.Application(middlewares=[guard])
    app.add_routes(page_routes(observer))  # type: ignore[arg-type]
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/ui/"
    finally:
        await runner.cleanup()


async def shot(page: Browser, name: str) -> None:
    if folder := os.environ.get("KVROUTER_SCREENSHOTS"):
        taken = await page.screenshot()
        await asyncio.to_thread((Path(folder) / f"{name}.png").write_bytes, taken)


SHOWN = (
    "document.getElementById('main')?.hidden === false && document.querySelectorAll('#components tbody tr').length > 0"
)


@pytest.mark.parametrize("workers", [3, 300])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_it_shows_the_fleet(workers: int, dark: bool, tmp_path: Path) -> None:
    async with served(MadeUp(workers)) as url, browser(tmp_path) as page:
        await page.open(url, dark=dark)
        await page.until(SHOWN)
        assert await page.evaluate("document.querySelectorAll('#components tbody tr').length") == workers
        assert await page.evaluate("document.querySelectorAll('.tile').length") == workers
        assert await page.evaluate("document.querySelectorAll('#decisions details').length") == 40
        assert await page.evaluate("document.querySelectorAll('#prefixes tbody tr').length") == 5
        assert await page.evaluate("document.querySelectorAll('svg .line').length") == 4
        traffic = await page.evaluate("document.getElementById('traffic').innerText")
        for words in ("12.5/s", "1,600/s", "120 ms", "480 ms", "2.50 s", "4.0 ms", "31 ms"):
            assert words in traffic
        errors = await page.evaluate("[...document.querySelectorAll('#errors tbody')].map((each) => each.innerText)")
        assert [each.split() for each in errors] == [["404", "model_not_found", "1", "3"], ["UNAVAILABLE", "2", "7"]]
        assert await page.evaluate("document.title") == "kvrouter", "names are text, not markup"
        assert await page.evaluate("document.images.length") == 0
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off"
        background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(15, 20, 26)") == dark
        assert page.messages == []
        await shot(page, f"{workers}-{'dark' if dark else 'light'}")


async def test_it_fits_a_telephone(tmp_path: Path) -> None:
    async with served(MadeUp(3)) as url, browser(tmp_path) as page:
        await page.open(url, width=390, height=1800)
        await page.until(SHOWN)
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        await page.evaluate("document.querySelector('#components .scroll').scrollLeft = 200")
        rank = "document.querySelector('#components tbody td').getBoundingClientRect().left"
        edge = "document.querySelector('#components .scroll').getBoundingClientRect().left"
        assert await page.evaluate("document.querySelector('#components .scroll').scrollLeft") == 200
        assert 0 <= await page.evaluate(f"{rank} - {edge}") < 2, "the rank stays beside its figures"
        cut = "[...document.querySelectorAll('#errors .scroll')].some((each) => each.scrollWidth > each.clientWidth)"
        assert not await page.evaluate(cut), "errors are shown with their counts"
        await shot(page, "telephone")


async def test_it_works_by_keyboard(tmp_path: Path) -> None:
    async with served(MadeUp(300)) as url, browser(tmp_path) as page:
        await page.open(url)
        await page.until(SHOWN)
        await page.evaluate("document.getElementById('filter').focus()")
        for key in "1.0 back":
            await page.press(key)
        await page.until("document.querySelectorAll('#components tbody tr').length < 300")
        rows = await page.evaluate("[...document.querySelectorAll('#components tbody tr')].map(r => r.textContent)")
        assert rows
        assert all("backed off" in row for row in rows)

        await page.evaluate("document.querySelector('[data-focus=\"fleet kvrouter/pool/requests\"]').focus()")
        await page.press("Enter")
        sort = "document.querySelector('[data-focus=\"fleet kvrouter/pool/requests\"]').closest('th').ariaSort"
        await page.until(f"{sort} === 'descending'")
        assert await page.evaluate("document.activeElement.dataset.focus") == "fleet kvrouter/pool/requests"

        await page.evaluate("document.querySelector('#decisions summary').focus()")
        await page.press("Enter")
        await page.until("document.querySelectorAll('#decisions details[open] tbody tr').length === 16")
        # It is drawn anew every two seconds: what is open stays open, and the focus stays.
        drawn = await page.evaluate("document.getElementById('freshness').textContent")
        await page.until(f"document.getElementById('freshness').textContent !== {drawn!r}")
        assert await page.evaluate("document.activeElement.tagName") == "SUMMARY"
        await shot(page, "decision")


async def test_ids_are_copied(tmp_path: Path) -> None:
    async with served(MadeUp(3)) as url, browser(tmp_path) as page:
        await page.open(url)
        await page.until(SHOWN)
        await page.evaluate(
            "document.execCommand = () => { window.taken = document.activeElement.value; return true; }"
        )
        await page.evaluate("navigator.clipboard.writeText = async (text) => { window.taken = text; }")
        await page.evaluate("document.querySelector('#decisions .id').click()")
        await page.until("document.getElementById('copied').textContent === 'copied request-0'")
        assert await page.evaluate("window.taken") == "request-0"
        assert await page.evaluate("document.querySelector('#decisions .id').title.startsWith('request-0 ')")
        assert await page.evaluate("document.querySelectorAll('#decisions details[open]').length") == 0


async def test_it_asks_for_a_key(tmp_path: Path) -> None:
    async with served(MadeUp(3), key="secret") as url, browser(tmp_path) as page:
        await page.open(url)
        await page.until("document.getElementById('login')?.hidden === false")
        assert await page.evaluate("document.getElementById('main').hidden")
        for key in "wrong":
            await page.press(key)
        await page.press("Enter")
        await page.until("document.getElementById('refused').textContent.includes('wrong')")
        for key in "secret":
            await page.press(key)
        await page.press("Enter")
        await page.until(SHOWN)
        assert "secret" not in await page.evaluate("document.documentElement.outerHTML + location.href")
