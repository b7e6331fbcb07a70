"""A rig as for the fault scenarios, and the C programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ...faults.conftest import nats_server, rig, seed
from .programs import BUILT, HERE, compiled

__all__ = ["nats_server", "rig", "seed"]


@pytest.fixture(scope="session", autouse=True)
def libraries() -> None:
    """Skips if the libraries are not built: ``make c-library`` builds them."""
    if not (BUILT / "libkvrouter_publisher.so").exists():
        pytest.skip("the C library is not built: make c-library")


@pytest.fixture(scope="session")
def driven_worker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that a test drives."""
    return compiled(HERE / "driven_worker.c", tmp_path_factory.mktemp("programs"))
