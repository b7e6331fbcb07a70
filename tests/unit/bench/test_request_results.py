"""Results of ``make bench-request``: what is read from the load generator, ratios, verdicts, tables, files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from rich.console import Console

MODULES = ("bars", "load", "memory", "report", "routers", "run", "samples", "traffic")
ONE_TOKEN_OUT = ("text of 1k", "chat of 1k", "text of 8k", "chat of 8k")


@pytest.fixture
def bench() -> Iterator[SimpleNamespace]:
    """The benchmark's modules, which are scripts in a folder and no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[3] / "bench/request"))
        modules: dict[str, ModuleType] = {name: __import__(name) for name in MODULES}
        yield SimpleNamespace(**modules)


def drawn(table: object) -> str:
    console = Console(width=250)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_the_result_of_the_load_generator_is_read(bench: SimpleNamespace) -> None:
    said = """Running 1s test @ http://127.0.0.1:1
  1 threads and 16 connections
RESULT {"requests":120,"seconds":1.0002,"bytes":2400,"refused":1,"broken":2,"late":3,"p50_us":900,"p99_us":4100}
"""
    result = bench.load.read(said)
    assert (result.requests, result.bytes, result.failed, result.p50_us) == (120, 2400, 6, 900)
    assert result.p99_us == 4100


def test_a_load_generator_without_a_result_is_reported_with_what_it_said(bench: SimpleNamespace) -> None:
    with pytest.raises(bench.load.NoLoad, match="unable to connect"):
        bench.load.read("unable to connect to 127.0.0.1:1 Connection refused\n")


def test_ratios_are_taken_round_by_round(bench: SimpleNamespace) -> None:
    samples = bench.samples.Samples()
    for number, (ours, theirs) in enumerate([(10, 10), (60, 20), (40, 20)]):
        samples.add("1k", "split", number, {"cpu_us": ours})
        samples.add("1k", "Dynamo", number, {"cpu_us": theirs})
    assert samples.ratio("1k", "split", "Dynamo", "cpu_us") == 2
    assert samples.ratio("1k", "split", "Dynamo", "p50_us") is None


def test_a_bar_is_met_missed_or_not_measured(bench: SimpleNamespace) -> None:
    samples = bench.samples.Samples()
    samples.add("decision", "kv", 0, {"p50_us": 25})
    samples.add("decision", "forecast", 0, {"p50_us": 51})
    by_system = {bar.system: bar.verdict(samples) for bar in bench.bars.BARS if bar.row == "decision"}
    assert by_system == {"kv": "met", "forecast": "missed"}
    assert {bar.verdict(samples) for bar in bench.bars.BARS if bar.row == "1k"} == {"not measured"}


def test_every_bar_over_http_has_work_that_measures_it(bench: SimpleNamespace) -> None:
    measured = {*bench.traffic.REQUESTS, *bench.traffic.STREAM, *bench.traffic.TEXT, "token"}
    measured |= {f"{row}, 4 workers" for row in bench.traffic.CORNERS} | {*bench.bars.LONG_PROMPTS, bench.bars.BESIDE}
    assert {bar.row for bar in bench.bars.BARS if bar.system in {"one process", "split"}} <= {*measured, "memory"}
    routers = {*bench.routers.FORWARDERS, *bench.routers.PICKERS}
    assert {bar.row for bar in bench.bars.BARS if bar.system in routers} == {
        *ONE_TOKEN_OUT,
        "chat of 8k, 7k shared",
        "token of a chat",
    }
    assert {*ONE_TOKEN_OUT, "chat of 8k, 7k shared"} <= set(bench.traffic.ROUTES)


def test_a_token_costs_what_a_streamed_response_costs_more(bench: SimpleNamespace) -> None:
    samples = bench.samples.Samples()
    samples.add("streamed", "picker", 0, {"cpu_us": 1000 + 127 * 20, "cpu_us picker": 600 + 127 * 8, "p50_us": 9})
    samples.add("one", "picker", 0, {"cpu_us": 1000, "cpu_us picker": 600, "p50_us": 5})
    bench.traffic.add_tokens(samples, "picker", "token", "streamed", "one")
    assert samples.names("token", "picker") == ["cpu_us", "cpu_us picker"]
    assert samples.median("token", "picker", "cpu_us picker") == pytest.approx(8)


def test_clients_and_engines_must_count_the_same_requests(bench: SimpleNamespace) -> None:
    before, after = {"requests": [5, 5], "hits": [1, 1]}, {"requests": [35, 15], "hits": [21, 11]}
    assert bench.traffic.reuse("a router", before, after, 38, 4) == {"hit_percent": 75, "busiest_engine": 1.5}
    for responses in (41, 31):
        with pytest.raises(bench.load.NoLoad, match=f"clients got {responses} responses, engines counted 40"):
            bench.traffic.reuse("a router", before, after, responses, 4)
    assert bench.traffic.reuse("a router", {}, {}, 38, 4) == {}


def test_the_shipped_configuration_of_envoy_gets_engines_with_and_without_pickers(bench: SimpleNamespace) -> None:
    picked = json.dumps(bench.routers.configured(1, [2, 3, 4, 5], [6]))
    alone = json.dumps(bench.routers.configured(1, [2, 3, 4, 5], []))
    assert all(f'"port_value": {port}' in picked for port in range(1, 7))
    assert ("ext_proc" in picked, "ext_proc" in alone) == (True, False)
    assert '"kvrouter"' not in alone


def test_samples_survive_a_file(bench: SimpleNamespace) -> None:
    samples = bench.samples.Samples()
    samples.add("1k", "split", 0, {"cpu_us": 1.5, "cpu_us frontend": 1.0})
    assert bench.samples.Samples.decode(json.loads(json.dumps(samples.encode()))) == samples


def test_tables_show_values_parts_verdicts_and_an_earlier_run(bench: SimpleNamespace) -> None:
    before, samples = bench.samples.Samples(), bench.samples.Samples()
    for taken, frontend in ((before, 900.0), (samples, 300.0)):
        taken.add("1k", "split", 0, {"cpu_us": 2 * frontend, "cpu_us frontend": frontend})
        taken.add("1k", "Dynamo", 0, {"cpu_us": 400.0})
    assert "frontend 300" in drawn(bench.report.measurements(samples))
    row = next(line for line in drawn(bench.report.bars(samples, before)).splitlines() if "split" in line)
    assert "4.50 times Dynamo" in row
    assert "1.50 times Dynamo" in row
    assert "met" in row


def test_growth_compares_the_second_quarter_of_the_requests_with_the_last(bench: SimpleNamespace) -> None:
    warming = [(100 * step, 50.0 + min(step, 3)) for step in range(1, 21)]
    leaking = [(100 * step, 50.0 + step) for step in range(1, 21)]
    assert bench.memory.growth(warming)["growth_percent"] == 0
    assert bench.memory.growth(leaking)["growth_percent"] > 10
    assert bench.memory.growth([(10, 50.0)])["growth_percent"] == 0


def test_unknown_parts_are_refused(bench: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.run.parse(["--only", "requests,nothing"])
    assert "no such part: nothing" in capsys.readouterr().err
