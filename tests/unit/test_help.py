"""Every command shows its help at once: without the libraries that take most of the time to start."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from kvrouter.cli.main import app
from typer.main import get_command

ROOT = Path(__file__).parents[2]
SLOW = ("aiohttp", "grpc", "numpy", "pydantic", "uvloop")
PROGRAM = """
import importlib, sys
module, sys.argv[0], *slow = sys.argv[1:8]
sys.argv[1:] = sys.argv[8:]
try:
    importlib.import_module(module).main()
except SystemExit as end:
    assert not end.code, end.code
print("imported", *[name for name in slow if name in sys.modules])
"""
SCRIPTS = {
    name: entry.partition(":")[0]
    for folder in (".", "devtools")
    for name, entry in tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]["scripts"].items()
}
MODULES = [
    str(path).partition("/src/")[2].removesuffix(".py").replace("/", ".")
    for path in sorted(each.relative_to(ROOT) for each in ROOT.glob("*/**/src/kvrouter/**/__main__.py"))
]


def commands() -> list[str]:
    return sorted(getattr(get_command(app), "commands", {}))


def help_of(module: str, program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", PROGRAM, module, program, *SLOW, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


@pytest.mark.parametrize("program", SCRIPTS)
def test_a_program_shows_its_help_at_once(program: str) -> None:
    shown = help_of(SCRIPTS[program], program, "--help")
    assert shown.lower().startswith(f"usage: {program} ")
    assert shown.splitlines()[-1].split() == ["imported"]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_shows_its_help_at_once(module: str) -> None:
    shown = help_of(module, module, "--help")
    assert shown.lower().startswith("usage: ")
    assert shown.splitlines()[-1].split() == ["imported"]


@pytest.mark.parametrize("command", commands())
def test_a_command_shows_its_help_at_once(command: str) -> None:
    shown = help_of("kvrouter.cli.main", "kvrouter", command, "--help")
    assert shown.lower().startswith(f"usage: kvrouter {command} ")
    assert shown.splitlines()[-1].split() == ["imported"]


@pytest.mark.parametrize("arguments", [("serve", "--help"), ("index", "--help"), ("--help",)])
def test_a_reader_that_leaves_is_no_failure(arguments: tuple[str, ...]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvrouter.cli.main", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    _, said = process.communicate()
    assert said == b""
