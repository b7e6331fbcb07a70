"""Compiles C and C++ programs with the header and the libraries of services/publisher_c."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

TREE = Path(__file__).parents[3]
HERE = Path(__file__).parent
CRATE = TREE / "services" / "publisher_c"
BUILT = CRATE / "target" / "release"
STATIC_NEEDS = ("-lpthread", "-ldl", "-lm", "-lgcc_s")
"""What the static library needs besides the C library."""


def compiled(source: Path, to: Path, *options: str, static: bool = False) -> Path:
    """Returns the program of a source file, in C or C++ by its name. Warnings are errors."""
    compiler, standard = ("c++", "-std=c++17") if source.suffix == ".cpp" else ("cc", "-std=c11")
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    program = to / source.stem
    linked = (
        (str(BUILT / "libkvrouter_publisher.a"), *STATIC_NEEDS)
        if static
        else (f"-L{BUILT}", "-lkvrouter_publisher", f"-Wl,-rpath,{BUILT}")
    )
    command = (
        *(compiler, standard, "-D_GNU_SOURCE", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", *options),
        *(f"-I{CRATE / 'include'}", str(source), "-o", str(program), *linked),
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program
