"""Generates the Python code of the contract below ``src``: messages, their types, and gRPC stubs.

Needs the packages of ``requirements.txt``; ``make protos`` runs it in an environment that has them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def generate(root: Path) -> None:
    """Writes messages and stubs for every file of the contract below ``root / "src"``.

    Raises:
        subprocess.CalledProcessError: protoc refused a file; its message is on standard error.
    """
    out = root / "src"
    files = sorted(str(path.relative_to(root)) for path in root.glob("kvrouter/v1/*.proto"))
    plugins = [f"--{plugin}_out={out}" for plugin in ("python", "pyi", "grpc_python")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={root}", *plugins, *files], check=True, cwd=root
    )
    for stub in out.glob("kvrouter/v1/*_pb2_grpc.py"):
        if "Stub" not in stub.read_text():
            stub.unlink()


if __name__ == "__main__":
    generate(Path(__file__).parent.resolve())
