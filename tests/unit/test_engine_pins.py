"""The requirements of the SDK leave room for the pins of the engines that it is installed beside."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ..packages.engine_pins import PINS

ROOT = Path(__file__).parents[2]
OURS = ("protos", "core", "net", "services/publisher_sdk", "services/engines")


def required() -> list[Requirement]:
    found = []
    for folder in OURS:
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        found += project["dependencies"]
    return [each for each in map(Requirement, found) if not each.name.startswith("kvrouter-")]


def lowest(specifiers: SpecifierSet) -> Version | None:
    """Returns the lowest version that is allowed: a lower bound, or what follows one that is excluded."""
    named = [Version(each.version.removesuffix(".*")) for each in specifiers if each.operator != "<"]
    following = [Version(f"{each.major}.{each.minor}.{each.micro + 1}") for each in named]
    return min((each for each in named + following if specifiers.contains(each)), default=None)


@pytest.mark.parametrize("engine", PINS)
def test_there_is_a_version_that_the_engine_and_the_sdk_accept(engine: str) -> None:
    together: dict[str, SpecifierSet] = defaultdict(SpecifierSet)
    for each in (*required(), *map(Requirement, PINS[engine])):
        together[each.name] &= each.specifier
    assert not {name: str(specifiers) for name, specifiers in together.items() if lowest(specifiers) is None}


def test_requirements_that_exclude_each_other_are_found() -> None:
    assert lowest(SpecifierSet(">=1.78,==1.78.0")) == Version("1.78.0")
    assert lowest(SpecifierSet("!=6.33.3.*,!=6.33.4.*,>=6.33.3,<7")) == Version("6.33.5")
    assert lowest(SpecifierSet(">=1.79,==1.78.0")) is None
    assert lowest(SpecifierSet(">=7.34,<7")) is None
