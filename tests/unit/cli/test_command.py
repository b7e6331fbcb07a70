from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from kvrouter.cli.errors import WrongUsage
from kvrouter.cli.interrupts import Interrupted, run_interruptibly
from kvrouter.cli.main import main
from kvrouter.devcommands.up import choose_port
from kvrouter.devtools.system.stack import StackOptions, service_environment


@pytest.fixture(autouse=True)
def no_other_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hides systems that run on this machine meanwhile."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def status_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["kvrouter", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["wat"], "No such command"),
        (["demo", "--wat"], "No such option"),
        (["demo", "--load", "0"], "load factor is 0.0"),
        (["demo", "--clock", "-1"], "clock factor is -1.0"),
        (["demo", "--workers", "0"], "--workers"),
        (["demo", "--mode", "wat"], "mode 'wat' is unknown: use forecast, kv, "),
        (["demo", "--mode", "kv", "--mode", "kv"], "given twice"),
        (["demo", "--trace", "missing.jsonl"], "missing.jsonl: cannot be read"),
        (["replay", "missing.jsonl"], "missing.jsonl: cannot be read"),
        (["replay", "--target", "8000"], "expected host:port, received '8000'"),
        (["up", "--mode", "wat"], "mode 'wat' is unknown"),
        (["up", "--clock", "nan"], "clock factor is nan"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert status_of(monkeypatch, *arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("kvrouter: ")
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert status_of(monkeypatch, *arguments) == 0
    said = capsys.readouterr().out
    assert all(command in said for command in ("demo", "up", "replay"))


def test_the_version_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"kvrouter {version('kvrouter')}\n"


def test_a_picture_without_what_draws_is_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.startswith(("matplotlib", "kvrouter.simulator.results.charts"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    picture = str(tmp_path / "picture.png")
    assert status_of(monkeypatch, "simulate", "--requests", "5", "--workers", "1", "--picture", picture) == 1
    said = capsys.readouterr()
    assert "time to first token" in said.out
    assert said.err == "kvrouter: a picture needs matplotlib: pip install 'kvrouter[devstack]'\n"


def test_a_target_that_does_not_answer_is_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(monkeypatch, "replay", "--target", "127.0.0.1:9", "--requests", "1") == 1
    assert "127.0.0.1:9 does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("frobnicate",), "kvrouter: No such command 'frobnicate'; see kvrouter --help\n"),
        (("drain",), "kvrouter: Missing argument 'worker'; see kvrouter drain --help\n"),
        (("index", "nope"), "; see kvrouter index --help\n"),
    ],
)
def test_wrong_usage_names_the_help(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(monkeypatch, *arguments) == 2
    assert capsys.readouterr().err.endswith(words)


def test_without_a_system_explain_says_how_to_start_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVROUTER_ETCD", "127.0.0.1:9")
    assert status_of(monkeypatch, "explain", "some-request") == 1
    assert "Start a system with kvrouter up or kvrouter serve" in capsys.readouterr().err


def test_a_taken_port_is_refused_if_named_and_avoided_otherwise() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        with pytest.raises(WrongUsage, match=f"port {taken}: it is taken"):
            choose_port(taken, default=taken)
        assert choose_port(None, default=taken) == 0
    assert choose_port(None, default=taken) == taken


def test_a_system_that_cannot_be_is_refused(tmp_path: Path) -> None:
    for wrong in ({"workers": 0}, {"prefill": -1}, {"blocks": 0}, {"block_size": -1}, {"clock": 0.0}):
        with pytest.raises(ValueError, match=r"expected"):
            StackOptions(tmp_path, tmp_path, **wrong)


def test_settings_for_other_systems_do_not_reach_the_services() -> None:
    environment = {"PATH": "/bin", "KVROUTER_CORE": "reference", "KVROUTER_PORT": "1", "NATS_SERVER": "x"}
    assert service_environment(environment) == {"PATH": "/bin", "KVROUTER_CORE": "reference"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_a_command_clean_up(number: signal.Signals) -> None:
    cleaned = []

    async def command() -> None:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), number)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    with pytest.raises(Interrupted) as interrupted:
        run_interruptibly(command())
    assert interrupted.value.exit_status == 128 + number
    assert cleaned == [True]


def test_results_and_failures_pass_through() -> None:
    async def failing() -> None:
        raise WrongUsage("no")

    async def answering() -> int:
        return 7

    assert run_interruptibly(answering()) == 7
    with pytest.raises(WrongUsage):
        run_interruptibly(failing())
