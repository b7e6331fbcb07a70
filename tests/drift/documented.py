"""The commands of engines that the documentation shows, with their options and the keys of their JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from itertools import pairwise

from ..guides.commands import REPOSITORY, blocks_of

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "vllm": ("vllm serve ",),
    "sglang": ("sglang serve ", "python -m sglang.launch_server "),
}


def options(engine: str) -> dict[str, str]:
    """Returns the options of an engine's commands, with a document that shows each."""
    return {word: page for page, words in _commands(engine) for word in words if word.startswith("--")}


def keys(engine: str, option: str) -> dict[str, str]:
    """Returns the keys of an option's JSON, with a document that shows each."""
    found = {}
    for page, words in _commands(engine):
        for name, value in pairwise(words):
            if name == option:
                found |= dict.fromkeys(json.loads(value), page)
    return found


def _commands(engine: str) -> Iterator[tuple[str, list[str]]]:
    for path in sorted((REPOSITORY / "docs").rglob("*.md")):
        for block in blocks_of(path.read_text()):
            for line in block.text.replace("\\\n", " ").splitlines():
                if line.startswith(COMMANDS[engine]):
                    yield str(path.relative_to(REPOSITORY)), shlex.split(line)
