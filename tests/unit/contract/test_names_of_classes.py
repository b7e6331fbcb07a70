"""A class name of the contract means one thing, in messages, errors and what engines and callers link beside them."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PUBLISHER = "services/publisher_sdk/src/kvrouter/publisher"
ERRORS = "protos/src/kvrouter/v1/*.py"
SURFACES = {
    # An engine handles messages and the types of the SDK together.
    "engines": (ERRORS, "protos/src/kvrouter/v1/*_pb2.pyi", f"{PUBLISHER}/*.py", f"{PUBLISHER}/serving/*.py"),
    # So does a service with the contracts, which are named as the services of the protos are.
    "services": (ERRORS, "protos/src/kvrouter/v1/*_pb2.pyi", "services/runtime/src/kvrouter/runtime/contracts.py"),
    # Programs that call a Frontend have dataclasses instead of messages, with the same names.
    "callers": (ERRORS, "client/src/kvrouter/client/*.py", "services/router/src/kvrouter/router/*.py"),
}


def public_classes(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}


@pytest.mark.parametrize("surface", SURFACES)
def test_a_class_name_is_defined_once(surface: str) -> None:
    places: defaultdict[str, set[str]] = defaultdict(set)
    for path in (path for pattern in SURFACES[surface] for path in ROOT.glob(pattern)):
        # Generated modules have their classes in the stub.
        if path.suffix == ".pyi" or "_pb2" not in path.stem:
            for name in public_classes(path):
                places[name].add(str(path.relative_to(ROOT)))
    assert len(places) > 20
    assert {name: sorted(found) for name, found in places.items() if len(found) > 1} == {}
