"""Stand-ins for the commands of engines that guides show: they start simulated servers."""

from __future__ import annotations

import sys
from pathlib import Path

_HEAD = f"""\
#!{sys.executable}
import os, sys
words = iter(sys.argv[2:])
arguments = []
"""
_TAIL = f"""
os.execv({str(Path(sys.executable).parent / "kvrouter-mocker")!r}, ["kvrouter-mocker", *arguments])
"""
_VLLM = """
arguments += ["--openai", "--model", next(words)]
for word in words:
    match word:
        case "--port":
            arguments += ["--bind", "127.0.0.1:" + next(words)]
        case "--data-parallel-size":
            arguments += ["--dp-size", next(words)]
        case _:
            arguments.append(word)
"""
_SGLANG = """
arguments.append("--sglang")
for word in words:
    match word:
        case "--port":
            arguments += ["--bind", "127.0.0.1:" + next(words)]
        case "--model-path":
            arguments += ["--model", next(words)]
        case "--page-size":
            arguments += ["--block-size", next(words)]
        case "--enable-metrics":
            pass
        case _:
            arguments.append(word)
"""


def write_engine_commands(directory: Path) -> Path:
    """Writes the commands ``vllm serve`` and ``sglang serve``; returns the directory for the path of commands.

    An option that neither the command nor the simulation knows ends it.
    """
    directory.mkdir()
    for name, translation in (("vllm", _VLLM), ("sglang", _SGLANG)):
        command = directory / name
        command.write_text(_HEAD + translation + _TAIL)
        command.chmod(0o755)
    return directory
