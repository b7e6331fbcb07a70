"""The files of the public contract stand for themselves, so that the internal ones may change."""

from __future__ import annotations

import importlib
import keyword

import pytest
from google.protobuf.descriptor import Descriptor, FileDescriptor

PUBLIC = {
    f"kvrouter/v1/{name}.proto" for name in ("frontend", "worker", "registry", "events", "calls", "common", "errors")
}
"""What clients, engines and what they publish need."""
INTERNAL = {f"kvrouter/v1/{name}.proto" for name in ("scheduler", "indexer", "sync", "snapshot", "packed")}
"""What only the services themselves send and store."""


def descriptor(name: str) -> FileDescriptor:
    module = importlib.import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2")
    file: FileDescriptor = module.DESCRIPTOR
    return file


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_file_imports_public_ones_only(name: str) -> None:
    assert {each.name for each in descriptor(name).dependencies} <= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC | INTERNAL))
def test_no_field_has_the_name_of_a_keyword(name: str) -> None:
    def words(message: Descriptor) -> set[str]:
        return {field.name for field in message.fields}.union(*map(words, message.nested_types))

    fields = set[str]().union(*map(words, descriptor(name).message_types_by_name.values()))
    assert {word for word in fields if keyword.iskeyword(word)} == set()
