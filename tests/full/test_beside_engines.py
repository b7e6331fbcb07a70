"""The SDK, installed with the pins of engines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ..packages.engine_pins import PINS
from ..packages.test_wheels import PROGRAMS, Environment, wheels

__all__ = ["wheels"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", PINS)
def test_the_sdk_runs_beside_the_pins_of_an_engine(
    engine: str,
    wheels: dict[str, Path],
    tmp_path: Path,
    nats_url: str,
    etcd_endpoint: str,
) -> None:
    probe = (sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--no-deps", "--ignore-installed", "xxhash")
    if subprocess.run(probe, check=False, capture_output=True).returncode:
        pytest.skip("needs a package registry")
    environment = Environment(tmp_path, wheels, "kvrouter-engines", list(PINS[engine]))
    installed = environment.versions()
    for pinned in map(Requirement, PINS[engine]):
        version = installed.get(canonicalize_name(pinned.name))
        assert version is None or pinned.specifier.contains(version), pinned
    environment.run("-m", "pip", "check")
    environment.run(str(PROGRAMS / "publisher.py"), nats_url, etcd_endpoint)
    for module in ("zmq_publisher", "translation", "tensorrt_llm", "vllm_sglang_events"):
        environment.run("-c", f"import kvrouter.engines.events.{module}")
