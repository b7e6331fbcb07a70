"""Policies of other packages, which add them by entry points."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest
from kvrouter.scheduler.policies.catalogue import GROUP, installed_policies
from kvrouter.scheduler.policies.interface import Policy
from kvrouter.scheduler.policies.load_only import RandomPolicy

EXAMPLE = Path(__file__).parents[4] / "examples" / "policy"

CHECKS = """
import json
from random import Random

from kvrouter.scheduler.policies.catalogue import POLICIES
from kvrouter.scheduler.request.options import RoutingOptions
from kvrouter.scheduler.settings import SchedulerSettings
from kvrouter.simulator.plan import routing_options
from kvrouter.simulator.simulation import Setting, simulate
from kvrouter.simulator.workloads.generators import generate
from kvrouter.simulator.workloads.workload import Prompts
from kvrouter.mocker.engine.config import EngineConfig

routing = SchedulerSettings(router_mode="fewest-blocks").routing()
workload = generate("chat", 40, 0)
outcome = simulate(workload, Setting([EngineConfig()] * 2, routing_options("fewest-blocks")), Prompts(workload, 16))
served = sum(each.was_served for each in outcome.served)
print(json.dumps([list(POLICIES), routing.mode, routing.queries_indexer, served]))
"""


class Misnamed(RandomPolicy):
    name: ClassVar[str] = "other"


class Mine(RandomPolicy):
    name: ClassVar[str] = "mine"


class Empty:
    name: ClassVar[str] = "empty"


def point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, f"{__name__}:{value}" if ":" not in value else value, GROUP)


def test_a_policy_that_cannot_be_used_leaves_the_others() -> None:
    installed = installed_policies(
        [
            point("mine", "Mine"),
            point("kv", "Mine"),
            point("empty", "Empty"),
            point("misnamed", "Misnamed"),
            point("absent", "no_such_module:Policy"),
        ]
    )
    assert list(installed.policies) == ["mine"]
    assert installed.refused["kv"].startswith("ValueError: expected a new name")
    assert installed.refused["empty"].startswith("TypeError: expected a subclass of Policy")
    assert "received 'other'" in installed.refused["misnamed"]
    assert installed.refused["absent"].startswith("ModuleNotFoundError")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Returns a directory with the example as an installer leaves it."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    metadata = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    points = project["entry-points"][GROUP]
    lines = "".join(f"{name} = {value}\n" for name, value in points.items())
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{lines}")
    (tmp_path / "fewest_blocks.py").write_text((EXAMPLE / "fewest_blocks.py").read_text())
    return tmp_path


def run(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(site)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)


def test_an_installed_policy_is_a_mode_like_the_built_in_ones(site: Path) -> None:
    done = run(site, CHECKS)
    assert done.returncode == 0, done.stderr
    modes, mode, queries_indexer, served = json.loads(done.stdout.splitlines()[-1])
    assert modes == sorted(modes)
    assert {"fewest-blocks", "forecast", "kv"} < set(modes)
    assert (mode, queries_indexer, served) == ("fewest-blocks", True, 40)


def test_choosing_a_policy_that_cannot_be_used_says_why(site: Path) -> None:
    (site / "fewest_blocks.py").write_text("raise RuntimeError('no licence')\n")
    done = run(
        site,
        "from kvrouter.scheduler.settings import SchedulerSettings\nSchedulerSettings(router_mode='fewest-blocks')",
    )
    assert "RuntimeError: no licence" in done.stderr


def test_the_example_states_its_terms(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))
    from random import Random

    import fewest_blocks  # type: ignore[import-not-found]

    from ..context_maker import context

    policy: Policy = fewest_blocks.FewestBlocksPolicy()
    choice = policy.decide(context(3, active_blocks=[9, 5, 9], overlap_blocks=[0, 0, 8]), Random(1))
    assert choice.index == 2
    assert list(choice.explanation.costs) == [9, 5, 1]
    assert set(choice.explanation.terms) == {"active_blocks", "overlap_blocks"}
