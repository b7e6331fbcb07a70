"""The software bill of materials: every Python distribution and Rust crate of a release, with licences."""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from .licences import Installed, required_by
from .tree import Tree

CRATES = ("core/rust", "services/mocker/rust", "services/publisher_c")


def write_sbom(tree: Tree, out: Path) -> None:
    """Writes the bill of materials in CycloneDX's JSON.

    Crates are those that cargo resolved for the artefacts in this tree.
    """
    product = component("pypi", "kvrouter", tree.version, "Apache-2.0", ComponentType.APPLICATION)
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"kvrouter:{tree.version}:{tree.committed}"))
    bom.metadata.timestamp = datetime.fromtimestamp(tree.committed, UTC)
    bom.metadata.component = product
    distributions = required_by(["kvrouter"])
    link(bom, python_components(distributions.values(), product), {n: d.requires for n, d in distributions.items()})
    for folder in CRATES:
        crates, requires = rust_crates(tree, folder)
        link(bom, crates, requires)
    name = f"kvrouter-{tree.version}.cdx.json"
    (out / name).write_text(JsonV1Dot6(bom).output_as_string(indent=1) + "\n", encoding="utf-8")


def link(bom: Bom, components: Mapping[str, Component], requires: Mapping[str, Iterable[str]]) -> None:
    """Adds components and who requires whom."""
    known = {str(each.purl): each for each in bom.components}
    chosen = {key: known.get(str(each.purl), each) for key, each in components.items()}
    for each in chosen.values():
        if bom.metadata.component is not each:
            bom.components.add(each)
    for key, each in chosen.items():
        bom.register_dependency(each, [chosen[needed] for needed in requires[key]])


def python_components(distributions: Iterable[Installed], product: Component) -> dict[str, Component]:
    """Returns a component for each distribution, by name; ``kvrouter`` is the product itself."""
    return {
        each.name: product if each.name == "kvrouter" else component("pypi", each.name, each.version, each.licence)
        for each in distributions
    }


def rust_crates(tree: Tree, folder: str) -> tuple[dict[str, Component], dict[str, list[str]]]:
    """Returns the crates that a crate is built of, by cargo's identifiers, and what each requires."""
    command = ["cargo", "metadata", "--format-version", "1", "--filter-platform", "x86_64-unknown-linux-gnu"]
    output = subprocess.run(command, cwd=tree.folder / folder, check=True, stdout=subprocess.PIPE).stdout
    resolved: dict[str, Any] = json.loads(output)
    requires = {
        node["id"]: [each["pkg"] for each in node["deps"] if any(kind["kind"] is None for kind in each["dep_kinds"])]
        for node in resolved["resolve"]["nodes"]
    }
    reached, waiting = set[str](), [resolved["resolve"]["root"]]
    while waiting:
        crate = waiting.pop()
        if crate not in reached:
            reached.add(crate)
            waiting += requires[crate]
    crates = {
        each["id"]: component("cargo", each["name"], each["version"], each["license"] or "not stated")
        for each in resolved["packages"]
        if each["id"] in reached
    }
    return crates, {crate: requires[crate] for crate in crates}


def component(
    kind: str, name: str, version: str, licence: str, of_type: ComponentType = ComponentType.LIBRARY
) -> Component:
    """Returns a component of the registry ``pypi`` or ``cargo``."""
    address = PackageURL(kind, name=name, version=version)
    return Component(
        name=name,
        version=version,
        type=of_type,
        purl=address,
        bom_ref=str(address),
        licenses=[LicenseFactory().make_from_string(licence.replace("/", " OR "))],
        properties=[Property(name="kvrouter:language", value={"pypi": "Python", "cargo": "Rust"}[kind])],
    )
