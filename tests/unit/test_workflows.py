"""The workflow files run commands that the Makefile has, and need no more than reading."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", WORKFLOWS)
def test_its_commands_exist(name: str) -> None:
    commands = [step.get("run", "") for job in WORKFLOWS[name]["jobs"].values() for step in job["steps"]]
    targets = {target for command in commands for target in re.findall(r"\bmake ([a-z0-9-]+)", command)}
    assert targets
    assert targets <= TARGETS


@pytest.mark.parametrize("name", WORKFLOWS)
def test_it_may_only_read_and_ends_in_time(name: str) -> None:
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 180 for job in WORKFLOWS[name]["jobs"].values())


def test_the_lanes_are_run() -> None:
    commands = " ".join(
        step.get("run", "") for flow in WORKFLOWS.values() for job in flow["jobs"].values() for step in job["steps"]
    )
    assert {"check", "test", "test-full", "release"} <= set(re.findall(r"\bmake ([a-z0-9-]+)", commands))
