"""Which implementation a process runs on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NAMES = {"local_hashes", "sequence_hashes", "PrefixIndex", "PredictedIndex", "ActiveSequences"}
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
    assert "KVROUTER_CORE is 'fast': use native, reference or auto" in shown.stderr
