"""Without the development stack the command works, and says what its other commands need."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer
from kvrouter.cli.development.commands import add_commands
from kvrouter.cli.extras import DEVELOPMENT_COMMANDS

WITHOUT = """
import sys
for name in ("devtools", "simulator", "mocker"):
    sys.modules[f"kvrouter.{name}"] = None
from kvrouter.cli.main import main
main()
"""


def without_the_stack(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [(), ("--help",), ("--wat", "file", "--load", "2")])
@pytest.mark.parametrize("command", DEVELOPMENT_COMMANDS)
def test_a_command_names_the_extra_that_it_needs(command: str, arguments: tuple[str, ...]) -> None:
    done = without_the_stack(command, *arguments)
    assert done.returncode == 2
    needs = "needs an extra that is not installed: pip install 'kvrouter[devstack]'"
    assert done.stderr == f"kvrouter: `kvrouter {command}` {needs}\n"
    assert done.stdout == ""


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_help_lists_every_command(arguments: tuple[str, ...]) -> None:
    done = without_the_stack(*arguments)
    assert done.returncode == 0
    listed = [line.split()[0] for line in done.stdout.partition("Commands:\n")[2].splitlines() if line.strip()]
    expected = {"serve", "relay", "sidecar", "explain", "drain", "undrain", "top", "index", "component", "keys"}
    assert {*DEVELOPMENT_COMMANDS} | expected == set(listed)
    assert done.stdout.count("Not installed: pip install 'kvrouter[devstack]'") == len(DEVELOPMENT_COMMANDS)


def test_the_other_commands_run() -> None:
    assert without_the_stack("--version").returncode == 0
    for command in ("serve", "explain", "top", "index", "component"):
        done = without_the_stack(command, "--help")
        assert done.returncode == 0, done.stderr


def test_the_commands_of_the_stack_are_those_that_are_named_without_it() -> None:
    app = typer.Typer()
    add_commands(app)
    assert tuple(command.name for command in app.registered_commands) == DEVELOPMENT_COMMANDS
