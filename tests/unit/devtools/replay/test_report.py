from __future__ import annotations

import json
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from kvrouter.devtools.replay.charts import draw
from kvrouter.devtools.replay.open_loop import ReplayResult
from kvrouter.devtools.replay.pacing import TimeScale
from kvrouter.devtools.replay.records import RequestRecord
from kvrouter.devtools.replay.report import print_report, write_json
from kvrouter.devtools.replay.statistics import RunStatistics, SystemCounts, statistics_of_run
from rich.console import Console


def run(mode: str, ttft_ms: float, cached: int) -> RunStatistics:
    records = []
    for index in range(200):
        record = RequestRecord(index, index / 4, prompt_tokens=1000, ended_engine_s=index / 4 + 2)
        record.cached_tokens, record.ttft_ms, record.worker = cached, ttft_ms + index, (index % 8, 0)
        record.router_ms, record.itl_ms = 1.5, [10.0, 12.0]
        records.append(record)
    counts = SystemCounts(events_applied=1234, events_faulty=0, step_late_p99_ms=3.0)
    result = ReplayResult(records, wall_seconds=12.0, times_limited=0)
    return statistics_of_run(
        result,
        mode=mode,
        workers=8,
        block_size=16,
        time_scale=TimeScale(2.5, 4),
        counts=counts,
        possible_hit_rate=0.4,
    )


def shown(*runs: RunStatistics, verbose: bool = True) -> str:
    console = Console(width=130, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_report(console, runs, verbose=verbose)
    return console.export_text()


def line_with(text: str, words: str) -> str:
    return next(line for line in text.splitlines() if words in line)


def test_two_runs_are_compared_in_a_text() -> None:
    text = shown(run("round-robin", 1000, 100), run("kv", 500, 300))
    cells = ["10.0%", "of", "40.0%", "30.0%", "of", "40.0%", "3.0", "times"]
    assert line_with(text, "cached tokens").split()[-8:] == cells
    assert "less" in line_with(text, "first token, mean")
    assert line_with(text, "busiest").split()[-1] == "same"
    assert "1,234" in line_with(text, "cache events applied")
    assert "Load factor 2.5" in text
    assert "Clock factor 4" in text
    assert "Valid:" in text


def test_the_throughput_counts_output_tokens() -> None:
    measured = replace(run("kv", 500, 300), output_tokens=10_000, completed=200, requests_per_engine_s=4.0)
    assert line_with(shown(measured), "output tokens per second").split()[-1] == "200"
    assert measured.as_json()["output_tokens_per_engine_s"] == 200.0
    assert replace(measured, completed=0).as_json()["output_tokens_per_engine_s"] is None


def test_times_of_real_engines_are_reported_once() -> None:
    scaled = run("kv", 500, 300)
    assert "requests per second (wall)" in shown(scaled)
    text = shown(replace(scaled, clock=1.0, workers=1))
    assert "requests per second (wall)" not in text
    assert "1 worker, 200 requests." in text
    assert "unless marked" not in text


def test_an_invalid_run_cannot_be_overlooked() -> None:
    good = run("kv", 500, 300)
    text = shown(
        replace(
            good, invalid=["requests were sent late"], errors={"UNAVAILABLE": 2}, error_examples={"UNAVAILABLE": "gone"}
        )
    )
    assert "INVALID kv: requests were sent late" in text
    assert "2 requests ended with UNAVAILABLE: gone" in text
    assert "Valid:" not in text


def test_json_names_the_trace_and_the_bounds(tmp_path: Path) -> None:
    write_json(tmp_path / "statistics.json", [run("kv", 500, 300)], trace="a.jsonl")
    written = json.loads((tmp_path / "statistics.json").read_text())
    assert written["trace"] == "a.jsonl"
    assert written["bounds"]["late_engine_ms_p99"] > 0
    assert written["runs"][0]["mode"] == "kv"
    assert written["runs"][0]["hit_rate"] == 0.3


def test_the_summary_has_eight_rows_with_the_best_possible_hit_rate_in_80_columns() -> None:
    text = shown(*(run(mode, 1000, 100) for mode in ("round-robin", "kv", "forecast")), verbose=False)
    lines = text.splitlines()
    top = next(place for place, line in enumerate(lines) if set(line.strip()) == {"─"})
    rows = list(takewhile(str.strip, lines[top + 1 :]))
    assert len(rows) == 8
    assert rows[0].count("10.0% of 40.0%") == 3
    assert max(len(line.rstrip()) for line in lines[top : top + 9]) <= 80


def test_the_picture_is_a_png_also_of_an_empty_run(tmp_path: Path) -> None:
    empty = statistics_of_run(
        ReplayResult([], 0.0, 0), mode="kv", workers=8, block_size=16, time_scale=TimeScale(1, 1), counts=SystemCounts()
    )
    draw(tmp_path / "two.png", [run("round-robin", 900, 10), run("kv", 300, 200)])
    draw(tmp_path / "none.png", [empty])
    for name in ("two.png", "none.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
