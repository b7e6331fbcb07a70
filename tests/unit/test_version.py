"""Distributions, the pins between them, Rust crates, command and documents have the version of the file VERSION."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import pytest
from kvrouter.runtime.version import VERSION
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
RELEASE = (ROOT / "VERSION").read_text().strip()
MANIFESTS = [*ROOT.glob("pyproject.toml"), *ROOT.glob("*/pyproject.toml"), *ROOT.glob("services/*/pyproject.toml")]
CRATES = ("core/rust/Cargo.toml", "services/mocker/rust/Cargo.toml", "services/publisher_c/Cargo.toml")


def manifest(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


DISTRIBUTIONS = {manifest(path)["project"]["name"]: path for path in sorted(MANIFESTS)}


def test_every_distribution_is_checked() -> None:
    others = ("client", "core", "devstack", "engines", "net", "protos", "publisher")
    assert set(DISTRIBUTIONS) == {"kvrouter", *(f"kvrouter-{name}" for name in others)}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_distribution_reads_its_version(name: str) -> None:
    project = manifest(DISTRIBUTIONS[name])["project"]
    assert "version" not in project
    assert project["dynamic"] == ["version"]
    assert version(name) == RELEASE, "run make setup"


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_distribution_requires_its_siblings_at_its_own_version(name: str) -> None:
    siblings = [each for each in map(Requirement, requires(name) or ()) if each.name in DISTRIBUTIONS]
    assert [str(each.specifier) for each in siblings] == [f"=={RELEASE}"] * len(siblings)
    assert siblings or name == "kvrouter-protos"


@pytest.mark.parametrize("crate", CRATES)
def test_a_crate_has_the_version(crate: str) -> None:
    assert manifest(ROOT / crate)["package"]["version"] == RELEASE


def test_the_services_report_the_version() -> None:
    assert VERSION == RELEASE


def test_the_changelog_begins_with_the_version() -> None:
    headings = re.findall(r"^## \[?([^\]\s]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] in {"Unreleased", RELEASE}


def test_documents_name_no_other_version() -> None:
    documents = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("services/*/README.md")]
    named = {
        (path.name, number)
        for path in documents
        for number in re.findall(r"\bkvrouter(?:-[a-z]+)?(?:==| |-)v?(\d+\.\d+\.\d+)", path.read_text())
    }
    assert {number for _, number in named} <= {RELEASE}, named
