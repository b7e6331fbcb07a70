"""The files of the public contract stand for themselves, so that the internal ones may change."""

from __future__ import annotations

import importlib

import pytest
from google.protobuf.descriptor import FileDescriptor

PUBLIC = {
    f"kvrouter/v1/{name}.proto" for name in ("frontend", "worker", "registry", "events", "calls", "common", "errors")
}
"""What clients, engines and what they publish need."""


def descriptor(name: str) -> FileDescriptor:
    module = importlib.import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2")
    file: FileDescriptor = module.DESCRIPTOR
    return file


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_file_imports_public_ones_only(name: str) -> None:
    assert {each.name for each in descriptor(name).dependencies} <= PUBLIC
