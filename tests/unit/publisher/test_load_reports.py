"""What an engine returns as its load is checked before it is published."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kvrouter.publisher.config import WorkerConfig
from kvrouter.publisher.errors import InvalidLoad, UnknownRank
from kvrouter.publisher.worker import load_reports
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
