"""The files of a model's tokenizer and chat template: which there are, and how a worker describes them.

A file is known by the hash of its content, so whoever fetches it knows it is the described one.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from kvrouter.v1.registry_pb2 import ModelFile

TOKENIZER = "tokenizer.json"
OUTPUT_FORMAT = "output_format.json"
"""How the model writes tool calls and reasoning: an object with tool_call_parser and reasoning_parser."""
NAMES = (
    "chat_template.jinja",
    "chat_template.json",
    OUTPUT_FORMAT,
    "special_tokens_map.json",
    TOKENIZER,
    "tokenizer_config.json",
)
"""Names of the files for Frontends: as Hugging Face names them, and one of kvrouter's own."""
MAX_BYTES = 256 << 20
"""Maximum size of all files of a model."""
PIECE_BYTES = 1 << 20
"""Bytes of a file in one message."""


_HUB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""An organization's or a model's name at Hugging Face."""


class InvalidModelFiles(ValueError):
    """The files of a model are missing, damaged or too large."""


def model_directory(model: str) -> Path | None:
    """Returns the directory of a model's files: ``model`` itself, or that of the model of this name in a cache.

    The cache is that of Hugging Face's libraries: ``HF_HUB_CACHE``, or ``hub`` in ``HF_HOME``. Returns None if there is
    neither. Blocks.
    """
    directory = Path(model)
    if directory.is_dir():
        return directory
    organization, slash, name = model.partition("/")
    if not _HUB_NAME.fullmatch(organization) or (slash and not _HUB_NAME.fullmatch(name)):
        return None
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    cached = cache / f"models--{model.replace('/', '--')}"
    try:
        directory = cached / "snapshots" / (cached / "refs" / "main").read_text(encoding="utf-8").strip()
        return directory if directory.is_dir() else None
    except (OSError, ValueError):
        return None


def read_model_files(directory: Path) -> dict[str, bytes]:
    """Reads the files of a model. Blocks.

    Raises:
        InvalidModelFiles: the directory has no tokenizer.json, or the files are too large or cannot be read.
    """
    try:
        paths = [path for name in NAMES if (path := directory / name).is_file()]
        if sum(path.stat().st_size for path in paths) > MAX_BYTES:
            raise InvalidModelFiles(f"the files in {directory} are larger than {MAX_BYTES} bytes")
        files = {path.name: path.read_bytes() for path in paths}
    except OSError as error:
        raise InvalidModelFiles(f"the files in {directory} cannot be read: {error}") from None
    if TOKENIZER not in files:
        raise InvalidModelFiles(f"expected {TOKENIZER} in {directory}, found none")
    return files


def describe_files(files: Mapping[str, bytes]) -> list[ModelFile]:
    """Returns names, hashes and sizes of files, in order of name."""
    return [
        ModelFile(name=name, sha256=hashlib.sha256(content).digest(), size=len(content))
        for name, content in sorted(files.items())
    ]
