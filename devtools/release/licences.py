"""Installed distributions with their licences, and who requires whom."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LONGEST_NAME = 50


@dataclass(frozen=True)
class Installed:
    """A distribution and the distributions that it requires here."""

    name: str
    version: str
    licence: str
    requires: tuple[str, ...]


def required_by(names: Iterable[str]) -> dict[str, Installed]:
    """Returns distributions and all that they require, by name in the form of package indexes.

    Raises:
        importlib.metadata.PackageNotFoundError: one of them is not installed.
    """
    found: dict[str, Installed] = {}
    waiting = [(name, released_extras(distribution(name))) for name in names]
    while waiting:
        name, extras = waiting.pop()
        if name in found:
            continue
        installed = distribution(name)
        needed = list(requirements(installed, extras))
        present = tuple(sorted({each for each, _ in needed}))
        found[name] = Installed(name, installed.version, licence(installed), present)
        waiting += needed
    return found


def released_extras(installed: Distribution) -> tuple[str, ...]:
    """Returns the extras whose dependencies belong to a release: all but those of development."""
    return tuple(extra for extra in installed.metadata.get_all("Provides-Extra") or () if extra != "dev")


def requirements(installed: Distribution, extras: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields what a distribution requires on this machine: names, and their extras."""
    for line in installed.requires or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield canonicalize_name(requirement.name), tuple(sorted(requirement.extras))


def licence(installed: Distribution) -> str:
    """Returns the licence that metadata state: an expression if there is one, otherwise its name."""
    stated = installed.metadata
    names = [stated[field] for field in ("License-Expression", "License") if field in stated]
    for text in names:
        if text and "\n" not in text and len(text) <= LONGEST_NAME:
            return text
    classifiers = [each for each in stated.get_all("Classifier") or () if each.startswith("License ::")]
    return " OR ".join(each.rpartition(" :: ")[2] for each in classifiers) or "not stated"
