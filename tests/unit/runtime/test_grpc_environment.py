"""gRPC reads its environment when it is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import importlib, os, sys

class Noting:
    def find_spec(self, name, *_):
        if name == "grpc":
            print(os.environ.get("GRPC_VERBOSITY"), os.environ.get("GRPC_EXPERIMENTS"))

sys.meta_path.insert(0, Noting())
importlib.import_module(sys.argv[1])
"""


@pytest.mark.parametrize("module", ["kvrouter.cli.explain", "kvrouter.scheduler.app"])
def test_the_environment_of_grpc_is_set_before_it_is_loaded(module: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    command = [sys.executable, "-c", PROGRAM, module]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["NONE", "-event_engine_client"]
