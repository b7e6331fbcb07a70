"""One contract suite for every implementation of the core: what a test asks for, it gets once from each."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest


def implementation(name: str, wanted: str) -> ModuleType:
    """The module that offers ``wanted``; skips where it is not built, or not complete."""
    if name == "reference":
        return importlib.import_module("kvrouter.core.reference")
    native = pytest.importorskip("kvrouter.core._native", reason="the native core is not built")
    if not hasattr(native, wanted):
        pytest.skip(f"the native core has no {wanted}")
    return native


@pytest.fixture(scope="session", params=["reference", "native"])
def hashing(request: pytest.FixtureRequest) -> ModuleType:
    return implementation(request.param, "local_hashes")


@pytest.fixture(scope="session", params=["reference", "native"])
def core(request: pytest.FixtureRequest) -> ModuleType:
    return implementation(request.param, "ActiveSequences")


@pytest.fixture(scope="session", params=["reference", "native"])
def index_class(request: pytest.FixtureRequest) -> type:
    return implementation(request.param, "PrefixIndex").PrefixIndex


@pytest.fixture(scope="session", params=["reference", "native"])
def predicted_class(request: pytest.FixtureRequest) -> type:
    return implementation(request.param, "PredictedIndex").PredictedIndex


@pytest.fixture(scope="session", params=["reference", "native"])
def sequences_class(request: pytest.FixtureRequest) -> type:
    return implementation(request.param, "ActiveSequences").ActiveSequences
