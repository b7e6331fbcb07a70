"""What an engine returns as its load is checked before it is published, and published if it is news."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from kvrouter.publisher.config import WorkerConfig
from kvrouter.publisher.errors import InvalidLoad, UnknownRank
from kvrouter.publisher.worker import Worker, load_reports
from kvrouter.publisher.worker_server import ModelFiles
from kvrouter.v1.common_pb2 import Rank, Transport
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.names import ComponentName


class Engine:
    def __init__(self, load: Any) -> None:
        self.load = lambda: load


CONFIG = WorkerConfig(component=ComponentName("ns", "pool"), model="m", block_size=4, ranks={0: 8, 1: 9})


def test_reports_are_completed() -> None:
    engine: Any = Engine({1: LoadReport(running_requests=3), 0: LoadReport(total_blocks=5)})
    first, second = load_reports(engine, CONFIG, incarnation=7, sequence=2)
    assert (first.rank.dp_rank, first.total_blocks, first.incarnation, first.sequence) == (0, 5, 7, 2)
    assert (second.rank.dp_rank, second.total_blocks, second.running_requests) == (1, 9, 3)


@pytest.mark.parametrize("rank", [2, -1, "0", None])
def test_the_load_of_an_unknown_rank_is_refused(rank: Any) -> None:
    engine: Any = Engine({rank: LoadReport()})
    with pytest.raises(UnknownRank, match=r"\[0, 1\]"):
        load_reports(engine, CONFIG, incarnation=7, sequence=1)


def test_an_unknown_cache_stays_unknown_and_one_without_blocks_is_refused() -> None:
    config = replace(CONFIG, ranks={0: None})
    unknown: Any = Engine({0: LoadReport()})
    [report] = load_reports(unknown, config, incarnation=7, sequence=1)
    assert not report.HasField("total_blocks")
    empty: Any = Engine({0: LoadReport(total_blocks=0)})
    with pytest.raises(InvalidLoad, match="1 or more"):
        load_reports(empty, config, incarnation=7, sequence=1)


@pytest.mark.parametrize("load", [None, [LoadReport()], {0: None}, {0: {"running_requests": 1}}])
def test_what_is_no_load_is_refused(load: Any) -> None:
    engine: Any = Engine(load)
    with pytest.raises(InvalidLoad, match="LoadReport"):
        load_reports(engine, CONFIG, incarnation=7, sequence=1)


class Link:
    """A connection that keeps what is published. What may happen meanwhile does."""

    def __init__(self) -> None:
        self.published: list[LoadReport] = []
        self.meanwhile: Callable[[], object] = lambda: None

    async def publish(self, subject: str, data: bytes) -> None:
        self.published.append(LoadReport.FromString(data))
        self.meanwhile()


def worker_of(engine: Any) -> tuple[Worker, Link]:
    link = Link()
    system: Any = SimpleNamespace(link=lambda _: link, keys=lambda *_: None)
    return Worker(CONFIG, engine, 7, Transport.TRANSPORT_CORE_NATS, {}, ModelFiles(), system), link


async def test_a_load_that_changes_while_it_is_published_is_news() -> None:
    load = LoadReport()
    worker, link = worker_of(Engine({0: load}))
    link.meanwhile = lambda: setattr(load, "running_requests", 1)
    await worker.report_load()
    await worker.report_load()
    await worker.report_load()
    assert [report.running_requests for report in link.published] == [0, 1]


async def test_what_the_worker_sets_itself_makes_no_load_news() -> None:
    load = LoadReport(rank=Rank(worker_id=5), incarnation=5)
    worker, link = worker_of(Engine({0: load}))
    for number in range(3):
        load.measured_unix_ns = load.sequence = number
        await worker.report_load()
    [report] = link.published
    assert (report.rank, report.incarnation, report.sequence) == (Rank(worker_id=CONFIG.worker_id), 7, 1)
    assert report.measured_unix_ns > number


async def test_loads_of_all_ranks_have_one_time() -> None:
    worker, link = worker_of(Engine({0: LoadReport(), 1: LoadReport()}))
    await worker.report_load()
    assert len({report.measured_unix_ns for report in worker.load_reports()}) == 1
    assert [report.rank.dp_rank for report in link.published] == [0, 1]
    assert len({report.measured_unix_ns for report in link.published}) == 1
