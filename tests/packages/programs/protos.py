"""Reads and writes a message of each file of the contract, and makes a stub of each service."""

from __future__ import annotations

import importlib
import pkgutil

import grpc
import kvrouter.v1
from google.protobuf.message import Message

messages = 0
channel = grpc.insecure_channel("127.0.0.1:1")
for info in pkgutil.iter_modules(kvrouter.v1.__path__):
    module = importlib.import_module(f"kvrouter.v1.{info.name}")
    for name, kind in vars(module).items():
        if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message:
            assert kind.FromString(kind().SerializeToString()) == kind()
            messages += 1
        elif name.endswith("Stub"):
            kind(channel)
assert messages
