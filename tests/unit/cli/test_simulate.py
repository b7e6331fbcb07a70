"""`kvrouter simulate` as a person types it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from kvrouter.cli.errors import WrongUsage
from kvrouter.cli.main import app, main
from kvrouter.simulator.workloads import traces
from typer.testing import CliRunner

SMALL = ["simulate", "prompts", "--requests", "60", "--workers", "2"]


def invoke(*arguments: str) -> str:
    done = CliRunner().invoke(app, [*SMALL, *arguments], catch_exceptions=False, standalone_mode=False)
    return done.output


def test_policies_side_by_side_as_table_json_and_picture(tmp_path: Path) -> None:
    run_statistics, picture = tmp_path / "f.json", tmp_path / "p.png"
    shown = invoke(
        "--compare",
        "round-robin,kv:4,forecast",
        "--seeds",
        "2",
        "--json",
        str(run_statistics),
        "--picture",
        str(picture),
    )
    for words in ("round-robin", "kv:4", "forecast", "medians of 2 seeds", "goodput", "output tokens per second"):
        assert words in shown
    assert "failed by a restart" not in shown
    assert "knee" not in shown
    runs = json.loads(run_statistics.read_text())["runs"]
    assert [(run["policy"], run["seed"]) for run in runs[:3]] == [("round-robin", 0), ("round-robin", 1), ("kv:4", 0)]
    assert all(run["statistics"]["requests"] == 60 for run in runs)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_sweep_finds_the_knee(tmp_path: Path) -> None:
    run_statistics, picture = tmp_path / "f.json", tmp_path / "p.svg"
    arguments = ("--compare", "forecast,random", "--sweep", "0.2,9", "--slo-ttft-ms", "700", "--picture", str(picture))
    shown = invoke(*arguments, "--json", str(run_statistics))
    assert "x0.2 " in shown
    assert "x9 " in shown
    document = json.loads(run_statistics.read_text())
    within = {(run["policy"], run["load"]): run["statistics"]["within_slo"] for run in document["runs"]}
    assert within["forecast", 0.2] >= 54 > within["forecast", 9], "the objective lies between: there is a knee"
    assert 0.2 <= document["knees"]["forecast"] < 9
    assert "knee (fewer than 90% within their objectives): forecast x" in shown
    assert "<svg" in picture.read_text()


def test_a_restart_is_shown() -> None:
    assert "failed by a restart" in invoke("--restart", "1:0")


def test_pools_share_the_work() -> None:
    pools = ["simulate", "prompts", "--requests", "60", "--prefill", "1", "--decode", "2"]
    done = CliRunner().invoke(app, pools, catch_exceptions=False, standalone_mode=False)
    assert "60 requests on 1 prefill and 2 decode engines" in done.output
    assert "prompts computed by the prefill pool" in done.output
    wrong = CliRunner().invoke(app, [*pools, "--kv-transfer-gb-per-second", "0"], standalone_mode=False)
    assert "must be finite and above 0" in str(wrong.exception)
    wrong = CliRunner().invoke(app, [*pools, "--restart", "1:0"], standalone_mode=False)
    assert "not simulated with --prefill" in str(wrong.exception)


def test_the_time_model_can_be_set() -> None:
    def mean(*arguments: str) -> float:
        plain = invoke(*arguments)
        return float(
            next(line for line in plain.splitlines() if line.strip().startswith("mean")).split()[-1].replace(",", "")
        )

    assert mean("--prefill-ms", "0,0.001,1") < mean() < mean("--prefill-ms", "0,0.1,50", "--decode-ms", "-1,5,50")


def test_a_workload_can_be_written_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    invoke("--save", str(path))
    assert len(traces.read(path).requests) == 60


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "best"], "policy 'best' is not known"),
        (["--policy", "direct"], "policy 'direct' is not known"),
        (["--policy", "kv:-1"], "weight is -1"),
        (["--policy", "kv:x"], "weight is 'x'"),
        (["--policy", "product:2"], "has no weight"),
        (["--compare", ""], "policy '' is not known"),
        (["--compare", "kv,kv"], "given twice"),
        (["--load", "0"], "--load is 0"),
        (["--load", "nan"], "--load is nan, must be finite"),
        (["--load", "2", "--sweep", "1,2"], "give one of them"),
        (["--policy", "kv", "--compare", "forecast,random"], "give one of them"),
        (["--sweep", "1,x"], "'x'"),
        (["--sweep", "2,2.0"], "given twice"),
        (["--sweep", ""], "--sweep is ''"),
        (["--speed", "1,0"], "--speed is 0"),
        (["--restart", "3:9"], "engine 0 to 1"),
        (["--restart", "-1:0"], "--restart is -1"),
        (["--budget", "10"], "--budget is 10: expected at least --sequences"),
        (["--blocks", "20"], "give it more --blocks"),
        (["--calibration-error", "0"], "--calibration-error is 0"),
        (["--temperature", "inf"], "--temperature is inf"),
        (["--event-lag-ms", "nan"], "--event-lag-ms is nan"),
        (["--prefill-ms", "1,2"], "write A,B,C"),
        (["--prefill-ms", "-1,0,5"], "not above 0"),
        (["--prefill-ms", "1,-100,5"], "not above 0"),
        (["--decode-ms", "1,2,nan"], "--decode-ms is nan"),
        (["--schedulers", "0"], "--schedulers"),
        (["--schedulers", "2", "--sync-lag-ms", "-1"], "--sync-lag-ms is -1"),
        (["--schedulers", "2", "--sync-lag-ms", "1", "--sync-loss", "1"], "--sync-loss is 1"),
        (["--schedulers", "2", "--sync-lag-ms", "1", "--sync-repair-ms", "-1"], "--sync-repair-ms is -1"),
        (["--schedulers", "2", "--sync-loss", "0.1"], "add --sync-lag-ms"),
        (["--schedulers", "2", "--sync-repair-ms", "9"], "add --sync-lag-ms"),
        (["--sync-lag-ms", "1"], "add --schedulers"),
        (["--sharding"], "add --schedulers"),
        (["--prefill", "2"], "belong together"),
        (["--prefill", "2", "--decode", "2"], "--workers excludes"),
        (["--kv-transfer-latency-ms", "2"], "add --prefill and --decode"),
        (["--of-model", "m"], "--of-model selects from a recording"),
        (["--picture", "p.gif"], "expected a name that ends in .png"),
        (["--picture", "/no/such/p.png"], "/no/such/p.png cannot be written"),
        (["--json", "/"], "/ cannot be written"),
        (["--wat"], "No such option"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    said = complaint(monkeypatch, capsys, *SMALL, *arguments)
    assert words in said


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no such file, and no generator of that name: prompts, chat"),
        ("", "holds no request"),
        ("hello", "trace.jsonl:1: is not JSON"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1]}', "stand for 512 tokens"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 999999, "hash_ids": [1]}', "give it more --blocks"),
    ],
)
def test_a_bad_trace_is_one_line_and_status_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    words: str,
) -> None:
    path = tmp_path / "trace.jsonl"
    if content is not None:
        path.write_text(content)
    assert words in complaint(monkeypatch, capsys, "simulate", str(path))


def complaint(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says on its way out with status 2."""
    monkeypatch.setattr(sys, "argv", ["kvrouter", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    assert said.count("\n") == 1
    return said


def test_the_floor_is_beside_the_policies(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    assert "floor" in invoke("--sweep", "1,2", "--floor", "--seeds", "2", "--json", str(file))
    runs = json.loads(file.read_text())["runs"]
    assert [(run["policy"], run["load"]) for run in runs if run["policy"] == "floor"] == [
        ("floor", 1.0),
        ("floor", 2.0),
    ]
    mean = {run["policy"]: run["statistics"]["ttft_ms"]["mean"] for run in runs}
    assert mean["floor"] < mean["forecast"]


def test_reuse_by_tier_is_shown_where_engines_have_tiers() -> None:
    small = ("--blocks", "1200", "--policy", "round-robin")
    host = invoke(*small, "--host-tier", "4000:5", "--kv-bytes-per-token", "1000")
    assert "loaded from host memory" in host
    assert "loaded from shared storage" not in host
    assert "loaded from shared storage" in invoke(*small, "--shared-tier", "4000:5:2")
    assert "loaded from" not in invoke(*small)


@pytest.mark.parametrize("text", ["many", "1:2:3:4", "-1", "10:0"])
def test_a_tier_is_written_as_blocks_bandwidth_and_latency(text: str) -> None:
    with pytest.raises(WrongUsage, match="--host-tier"):
        invoke("--host-tier", text)
