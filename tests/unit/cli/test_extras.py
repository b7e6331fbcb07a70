"""Without the development stack the command works, and says what its other commands need."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

import pytest
import typer
from kvrouter.cli.extras import DEVELOPMENT_COMMANDS
from kvrouter.devcommands.declarations import add_commands

USES = [(), ("--help",), ("--wat", "file", "--load", "2")]
OTHERS = ("serve", "explain", "top", "index", "component")
CALLS = [
    (),
    ("--help",),
    ("--version",),
    *((command, *arguments) for command in DEVELOPMENT_COMMANDS for arguments in USES),
    *((command, "--help") for command in OTHERS),
]
WITHOUT = """
import contextlib, io, json, sys
for name in ("devtools", "simulator", "mocker"):
    sys.modules[f"kvrouter.{name}"] = None
from kvrouter.cli.main import main

def run(arguments):
    sys.argv[1:] = arguments
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
    return code, out.getvalue(), err.getvalue()

json.dump([run(arguments) for arguments in json.load(sys.stdin)], sys.stdout)
"""


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def done() -> dict[tuple[str, ...], Done]:
    """What each call did, in one interpreter without the stack: to start one takes a second."""
    command = [sys.executable, "-c", WITHOUT]
    outcomes = subprocess.run(command, input=json.dumps(CALLS), capture_output=True, text=True, check=True)
    return {call: Done(*outcome) for call, outcome in zip(CALLS, json.loads(outcomes.stdout), strict=True)}


@pytest.mark.parametrize("arguments", USES)
@pytest.mark.parametrize("command", DEVELOPMENT_COMMANDS)
def test_a_command_names_the_extra_that_it_needs(
    done: dict[tuple[str, ...], Done], command: str, arguments: tuple[str, ...]
) -> None:
    needs = "needs an extra that is not installed: pip install 'kvrouter[devstack]'"
    assert done[command, *arguments] == Done(2, "", f"kvrouter: `kvrouter {command}` {needs}\n")


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_help_lists_every_command(done: dict[tuple[str, ...], Done], arguments: tuple[str, ...]) -> None:
    shown = done[arguments]
    assert shown.returncode == 0
    listed = [line.split()[0] for line in shown.stdout.partition("Commands:\n")[2].splitlines() if line.strip()]
    expected = {
        "serve",
        "relay",
        "sidecar",
        "explain",
        "drain",
        "undrain",
        "top",
        "engine",
        "index",
        "component",
        "keys",
    }
    assert {*DEVELOPMENT_COMMANDS} | expected == set(listed)
    assert shown.stdout.count("Not installed: pip install 'kvrouter[devstack]'") == len(DEVELOPMENT_COMMANDS)


@pytest.mark.parametrize("call", [("--version",), *((command, "--help") for command in OTHERS)])
def test_the_other_commands_run(done: dict[tuple[str, ...], Done], call: tuple[str, ...]) -> None:
    assert done[call].returncode == 0, done[call].stderr


def test_the_commands_of_the_stack_are_those_that_are_named_without_it() -> None:
    app = typer.Typer()
    add_commands(app)
    assert tuple(command.name for command in app.registered_commands) == DEVELOPMENT_COMMANDS
