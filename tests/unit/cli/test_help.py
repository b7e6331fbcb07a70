"""Help is shown without importing what the commands do."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import typer
from kvrouter.cli.main import app
from kvrouter.scheduler.request.remote_prefill import RemotePrefillOptions
from kvrouter.simulator.plan import NAMES
from kvrouter.simulator.routing.replicas import Sync
from kvrouter.simulator.workloads.generators import GENERATORS

HEAVY = (
    *("aiohttp", "asyncio", "cryptography", "google.protobuf", "grpc", "nats", "numpy", "prometheus_client"),
    *("pydantic", "rich", "structlog"),
)
SHOW = """
import contextlib, io, json, sys
from kvrouter.cli.main import main

shown = []
for names in json.loads(sys.argv[1]):
    sys.argv[1:] = [*names, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main()
        except SystemExit as end:
            shown.append([end.code, out.getvalue()])
json.dump([shown, [name for name in json.loads(sys.stdin.read()) if name in sys.modules]], sys.stdout)
"""


def commands(command: Any, names: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Returns the names of a command and of all below it."""
    below = getattr(command, "commands", {})
    return [names, *(each for name in below for each in commands(below[name], (*names, name)))]


def helps(*calls: tuple[str, ...]) -> tuple[list[tuple[int, str]], list[str]]:
    """Returns exit status and help of each command, and the heavy modules that were imported for all of them."""
    arguments = [sys.executable, "-c", SHOW, json.dumps(calls)]
    done = subprocess.run(arguments, input=json.dumps(HEAVY), capture_output=True, text=True, check=True)
    shown, imported = json.loads(done.stdout)
    return [(status, text) for status, text in shown], imported


def test_help_imports_nothing_heavy() -> None:
    calls = commands(typer.main.get_command(app))
    assert len(calls) > 20
    shown, imported = helps(*calls)
    for names, (status, text) in zip(calls, shown, strict=True):
        assert status == 0
        assert text.lower().startswith(" ".join(("usage: kvrouter", *names, "")))
        assert "--help" in text
    assert imported == []


@pytest.mark.parametrize("command", ["simulate", "replay", "demo"])
def test_help_names_the_workloads(command: str) -> None:
    (shown, *_), _ = helps((command,))
    assert f"({', '.join(GENERATORS)})" in " ".join(shown[1].split())


def test_help_names_policies_and_defaults() -> None:
    (shown, *_), _ = helps(("simulate",))
    words = " ".join(shown[1].split())
    assert f"Policy: {', '.join(NAMES)}; " in words
    assert f"{RemotePrefillOptions().min_tokens} by default" in words
    assert f"{Sync().repair_s * 1e3:g} by default" in words


def test_commands_and_services_are_described_in_full() -> None:
    (every, serve, *_), _ = helps((), ("serve",))
    assert "..." not in every[1].partition("Commands:")[2]
    assert serve[1].startswith("usage: kvrouter serve [options]\n")
    assert "--roles NAMES" in serve[1]
    assert "Default: ()" not in serve[1]
