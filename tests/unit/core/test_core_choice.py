"""Which implementation a process runs on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from kvrouter import core
from kvrouter.core import reference

NAMES = set(reference.__all__)
SHOW = "import kvrouter.core as core; print(core.IMPLEMENTATION, *sorted(set(core.IMPLEMENTATIONS.values())))"


def start(choice: str | None, code: str = SHOW) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "KVROUTER_CORE"}
    if choice is not None:
        environment["KVROUTER_CORE"] = choice
    return subprocess.run(  # the choice is made at import, once in a process
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )


def native_names() -> set[str]:
    try:
        from kvrouter.core import _native
    except ImportError:
        return set()
    return NAMES & set(dir(_native))


def test_the_package_lists_every_name_of_the_core() -> None:
    assert set(reference.__all__) <= set(core.__all__)
    assert all(hasattr(core, name) for name in core.__all__)


def test_the_reference_on_request() -> None:
    assert start("reference").stdout == "reference reference\n"


@pytest.mark.parametrize("choice", [None, "", "auto"])
def test_the_native_core_where_it_is_built(choice: str | None) -> None:
    names = native_names()
    shown = start(
        choice, "import kvrouter.core as core; print(sorted(core.IMPLEMENTATIONS.items()), core.IMPLEMENTATION)"
    )
    expected = sorted((name, "native" if name in names else "reference") for name in NAMES)
    assert shown.stdout == f"{expected} {'native' if names == NAMES else 'reference'}\n", shown.stderr


def test_the_native_core_on_request_is_all_of_it() -> None:
    shown = start("native")
    if native_names() == NAMES:
        assert shown.stdout == "native native\n"
    else:
        assert shown.returncode != 0
        assert "ImportError" in shown.stderr


def test_anything_else_is_refused() -> None:
    shown = start("fast")
    assert shown.returncode != 0
    assert "expected KVROUTER_CORE to be native, reference or auto, received 'fast'" in shown.stderr


@pytest.mark.skipif(shutil.which("cargo") is None, reason="no Rust toolchain: the core cannot be built")
def test_where_rust_is_the_native_core_is_loaded() -> None:
    assert start(None).stdout == "native native\n"


WITHOUT_NATIVE = """
import sys
sys.modules["kvrouter.core._native"] = None
from kvrouter.runtime.process.lifecycle import run
from kvrouter.runtime.config.settings import ServiceSettings
async def main(stopping): print("serving")
run(main, ServiceSettings(), "indexer")
"""


def test_a_service_warns_once_of_the_reference_unless_it_is_requested() -> None:
    warned = start(None, WITHOUT_NATIVE)
    assert warned.returncode == 0, warned.stderr
    assert warned.stdout.count("serving\n") == 1
    said = warned.stdout + warned.stderr
    assert said.count("core.not_native") == said.count("KVROUTER_CORE=reference") == 1
    requested = start("reference", WITHOUT_NATIVE)
    assert requested.returncode == 0
    assert "core.not_native" not in requested.stdout + requested.stderr
