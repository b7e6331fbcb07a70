"""`kvrouter tune` as a person types it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kvrouter.cli.errors import WrongUsage
from kvrouter.cli.main import app, main
from kvrouter.devcommands.discovered_fleet import DiscoveredFleet, fleet_of
from kvrouter.devcommands.fleet_file import FleetSize, read_fleet
from kvrouter.runtime.config.sources import read_all
from kvrouter.scheduler.settings import SchedulerSettings
from kvrouter.v1.common_pb2 import Role
from kvrouter.v1.registry_pb2 import RankRegistration, WorkerRegistration
from typer.testing import CliRunner

SMALL = ["tune", "prompts", "--requests", "40", "--workers", "2", "--seeds", "1", "--processes", "1", "--budget", "60"]


def test_it_writes_options_that_the_scheduler_loads(tmp_path: Path) -> None:
    before, after = tmp_path / "before.toml", tmp_path / "after.toml"
    before.write_text('[scheduler]\nrouter_mode = "round-robin"\nactive_decode_blocks_threshold = 0.5\n')
    arguments = [*SMALL, "--config", str(before), "--no-splits", "--write", str(after)]
    shown = CliRunner().invoke(app, arguments, catch_exceptions=False, standalone_mode=False).output
    assert "2 workers on 28 requests, the best on 12 further ones" in shown
    assert "held-out part: present, round-robin" in shown
    assert "better with" in shown
    assert after.read_text().startswith("# kvrouter tune: ")
    (settings,) = read_all([SchedulerSettings], ["--config", str(after)], {})
    assert f"{settings.router_mode}" in shown


def test_what_it_writes_is_the_fleet_that_it_starts_from(tmp_path: Path) -> None:
    written = tmp_path / "tuned.toml"
    written.write_text('[fleet]\nprefill = 1\ndecode = 2\n[scheduler]\nrouter_mode = "kv"\n')
    small = [each for each in SMALL if each not in ("--workers", "2")]
    arguments = [*small, "--no-splits", "--config", str(written), "--write", str(written)]
    shown = CliRunner().invoke(app, arguments, catch_exceptions=False, standalone_mode=False).output
    assert "of 3 workers" in shown
    assert "present, kv:1, 1 prefill" in shown
    assert read_fleet(written) in {FleetSize(2, 1), FleetSize(3, 0)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[fleet]", "expected workers, or prefill and decode"),
        ("[fleet]\nprefill = 1", "expected workers, or prefill and decode"),
        ("[fleet]\nworkers = 0", "workers in [fleet]"),
        ("[fleet]\nprefill = true\ndecode = 1", "prefill in [fleet]"),
        ("fleet = 3", "expected workers, or prefill and decode"),
        ("[fleet", "cannot read"),
    ],
)
def test_a_malformed_fleet_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "f.toml"
    path.write_text(text)
    with pytest.raises(WrongUsage, match=re.escape(words)):
        read_fleet(path)


def test_a_file_without_a_fleet_has_none(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_text('[scheduler]\nrouter_mode = "kv"\n')
    assert read_fleet(path) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--write", "/no/such/f.toml"], "cannot be written"),
        (["--config", "/no/such/f.toml"], "cannot read /no/such/f.toml"),
        (["--prefill", "2"], "belong together"),
        (["--prefill", "2", "--decode", "2"], "--workers excludes"),
        (["--blocks", "20"], "give it more --blocks"),
        (["--requests", "5"], "expected at least 20"),
        (["--prefill-ms", "1"], "write A,B,C"),
        (["--batched-tokens", "1"], "max_batched_tokens is 1"),
        (["--budget", "0"], "--budget"),
        (["--discover"], "--discover excludes --workers"),
    ],
)
def test_what_is_wrong_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    monkeypatch.setattr("sys.argv", ["kvrouter", *SMALL, *arguments])
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert words in capsys.readouterr().err


def test_a_mode_that_takes_the_worker_from_the_request_cannot_be_tuned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    present = tmp_path / "present.toml"
    present.write_text('[scheduler]\nrouter_mode = "direct"\n')
    monkeypatch.setattr("sys.argv", ["kvrouter", *SMALL, "--config", str(present)])
    with pytest.raises(SystemExit):
        main()
    assert "mode direct cannot be simulated" in capsys.readouterr().err


def worker(role: Role, *, ranks: int = 1, model: str = "m", block_size: int = 32) -> WorkerRegistration:
    registered = [RankRegistration(dp_rank=rank, total_blocks=1000 + rank) for rank in range(ranks)]
    return WorkerRegistration(model=model, role=role, block_size=block_size, ranks=registered, max_sequences=64)


def test_a_running_fleet_is_described_by_its_registrations() -> None:
    registered = [worker(Role.ROLE_PREFILL), worker(Role.ROLE_DECODE, ranks=3), worker(Role.ROLE_BOTH, model="other")]
    assert fleet_of(registered, "m") == DiscoveredFleet("m", 1, 3, 1000, 32, 8192, 64)
    assert fleet_of(registered, "other").prefill == 0


@pytest.mark.parametrize(
    ("registered", "words"),
    [
        ([], "no worker is registered"),
        ([worker(Role.ROLE_PREFILL)], "none that decodes"),
        ([worker(Role.ROLE_BOTH), worker(Role.ROLE_BOTH, model="other")], "choose by --of-model"),
        ([worker(Role.ROLE_BOTH), worker(Role.ROLE_BOTH, block_size=16)], "expected one size"),
    ],
)
def test_workers_that_do_not_make_one_fleet_are_refused(registered: list[WorkerRegistration], words: str) -> None:
    with pytest.raises(WrongUsage, match=words):
        fleet_of(registered, None)
