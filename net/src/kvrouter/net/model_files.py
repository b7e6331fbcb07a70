"""The files of a model's tokenizer and chat template, and where a namespace stores them.

A file is stored under the hash of its content. So a file is written once however many workers publish it, and what was
read is known to be what was published.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Mapping
from pathlib import Path

import nats.js.errors
from kvrouter.v1.names import model_files_bucket
from kvrouter.v1.registry_pb2 import ModelFile
from nats.js import JetStreamContext
from nats.js.errors import APIError
from nats.js.object_store import ObjectStore

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
"""Names of the files that Frontends use: as Hugging Face names them, and one of kvrouter's own."""
MAX_BYTES = 256 << 20
"""Maximum size of all files of a model."""

_GONE = (nats.js.errors.NotFoundError, nats.js.errors.ObjectNotFoundError, nats.js.errors.BucketNotFoundError)


class InvalidModelFiles(ValueError):
    """The files of a model are missing, damaged or too large."""


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


async def store_files(js: JetStreamContext, namespace: str, files: Mapping[str, bytes]) -> None:
    """Stores the files that are not stored yet.

    Raises:
        nats.errors.Error, TimeoutError, OSError: NATS is away or stores nothing.
    """
    store = await _bucket(js, namespace)
    for content in files.values():
        name = hashlib.sha256(content).hexdigest()
        try:
            if (await store.get_info(name)).size == len(content):
                continue
        except _GONE:
            pass
        await store.put(name, io.BytesIO(content))


async def fetch_files(js: JetStreamContext, namespace: str, described: Iterable[ModelFile]) -> dict[str, bytes]:
    """Returns the content of described files by name.

    Raises:
        InvalidModelFiles: a file is not stored, is damaged, or the files are too large.
        nats.errors.Error, TimeoutError, OSError: NATS is away.
    """
    described = [file for file in described if file.name in NAMES]
    if sum(file.size for file in described) > MAX_BYTES:
        raise InvalidModelFiles(f"the published files are larger than {MAX_BYTES} bytes")
    files = {}
    for file in described:
        try:
            store = await js.object_store(model_files_bucket(namespace))
            content = (await store.get(file.sha256.hex())).data or b""
        except _GONE:
            raise InvalidModelFiles(f"{file.name} is not stored (any more): a worker must publish it again") from None
        if hashlib.sha256(content).digest() != file.sha256:
            raise InvalidModelFiles(f"{file.name} is damaged: its hash differs")
        files[file.name] = content
    if TOKENIZER not in files:
        raise InvalidModelFiles(f"expected {TOKENIZER} among the published files, found none")
    return files


async def _bucket(js: JetStreamContext, namespace: str) -> ObjectStore:
    bucket = model_files_bucket(namespace)
    try:
        return await js.object_store(bucket)
    except _GONE:
        try:
            return await js.create_object_store(bucket)
        except APIError:
            return await js.object_store(bucket)  # Another worker has created it at the same time.
