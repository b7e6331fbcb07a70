"""gRPC servers and stubs for the protocols in ``kvrouter.runtime.contracts``."""

from kvrouter.runtime.rpc.client import (
    call_stream_client,
    open_channel,
    remote,
    remote_on_call_stream,
    remote_on_connections,
)
from kvrouter.runtime.rpc.guard import Guard, Metadata
from kvrouter.runtime.rpc.server import RpcServer, may_wait, not_awaited_by_drain

__all__ = [
    "Guard",
    "Metadata",
    "RpcServer",
    "call_stream_client",
    "may_wait",
    "not_awaited_by_drain",
    "open_channel",
    "remote",
    "remote_on_call_stream",
    "remote_on_connections",
]
