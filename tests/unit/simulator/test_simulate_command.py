"""`kvrouter simulate` as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvrouter.cli.faults import WrongUsage
from kvrouter.cli.main import app
from kvrouter.simulator import traces
from typer.testing import CliRunner

SMALL = ["simulate", "prompts", "--requests", "60", "--workers", "2"]


def invoke(*arguments: str) -> str:
    done = CliRunner().invoke(app, [*SMALL, *arguments], catch_exceptions=False, standalone_mode=False)
    return done.output


def test_policies_side_by_side_as_table_json_and_picture(tmp_path: Path) -> None:
    figures, picture = tmp_path / "f.json", tmp_path / "p.png"
    shown = invoke(
        "--compare", "round-robin,kv:4,forecast", "--seeds", "2", "--json", str(figures), "--picture", str(picture)
    )
    for words in ("round-robin", "kv:4", "forecast", "medians of 2 seeds"):
        assert words in shown
    runs = json.loads(figures.read_text())["runs"]
    assert [(run["policy"], run["seed"]) for run in runs[:3]] == [("round-robin", 0), ("round-robin", 1), ("kv:4", 0)]
    assert all(run["figures"]["requests"] == 60 for run in runs)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_sweep_goes_through_the_loads(tmp_path: Path) -> None:
    shown = invoke("--policy", "forecast", "--sweep", "1,8", "--picture", str(tmp_path / "p.png"))
    assert "x1 " in shown
    assert "x8 " in shown


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
        (["--policy", "product:2"], "has no weight"),
        (["--load", "0"], "--load is 0"),
        (["--sweep", "1,x"], "'x'"),
        (["--speed", "1,0"], "--speed is 1,0"),
        (["--restart", "3:9"], "engine 0 to 1"),
        (["--budget", "10"], "max_batched_tokens is 10"),
        (["--blocks", "20"], "give it more --blocks"),
        (["--pace", "0"], "--pace is 0"),
    ],
)
def test_wrong_usage_is_said(arguments: list[str], words: str) -> None:
    with pytest.raises(WrongUsage, match=words):
        invoke(*arguments)
